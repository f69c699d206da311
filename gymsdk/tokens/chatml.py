"""Render conversations as ChatML, with tools and tool calls in the Hermes format.

A turn is `<|im_start|>ROLE`, a line break, the text, `<|im_end|>` and a line break. Tool outputs are rendered in a
user turn. No turn is ever shortened later, not even its reasoning, so a longer conversation always starts with the
rendering of the shorter one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator
from enum import StrEnum
from functools import lru_cache
from itertools import groupby

from gymsdk.convert.content import prepend_think_block
from gymsdk.errors import UsageError
from gymsdk.types import Content, Item, extract_text

TOOL_RESPONSE_TAGS = ("<tool_response>", "</tool_response>")
"""The tags around the output of a tool."""


class SpecialToken(StrEnum):
    """A token that gives a conversation its structure."""

    TEXT_END = "<|endoftext|>"
    START = "<|im_start|>"
    END = "<|im_end|>"


Piece = SpecialToken | str
"""A special token, or plain text. Text that spells a special token is still text."""


def render_pieces(
    messages: Iterable[Item], *, tools: Iterable[Item] | None = None, add_generation_prompt: bool = False
) -> Iterator[Piece]:
    """Yield the special tokens and texts of a conversation.

    Args:
        messages: Chat messages. `developer` counts as `system`.
        tools: The tools to describe in the system message, in the format of Chat Completions.
        add_generation_prompt: Whether to append the start of an assistant turn.

    Raises:
        UsageError: A message has an unknown role or content that is not text.
    """
    turns = [(_get_role(message), _format_message(message)) for message in messages]
    if tools := list(tools or []):
        description = format_tools(tools)
        system = turns.pop(0)[1] if turns and turns[0][0] == "system" else ""
        turns.insert(0, ("system", f"{system}\n\n{description}" if system else description))
    for role, run in groupby(turns, key=lambda turn: turn[0]):
        texts = [text for _, text in run]
        for text in ["\n".join(texts)] if role == "tool" else texts:
            yield from (SpecialToken.START, f"{'user' if role == 'tool' else role}\n", text, SpecialToken.END, "\n")
    if add_generation_prompt:
        yield from (SpecialToken.START, "assistant\n")


def join_pieces(pieces: Iterable[Piece]) -> str:
    """Return *pieces* as text, with special tokens that the plain text spells escaped."""
    runs = groupby(pieces, key=lambda piece: isinstance(piece, SpecialToken))
    return "".join(
        "".join(run) if is_special else escape_markers("".join(run), [*SpecialToken]) for is_special, run in runs
    )


def truncate_at_special_token(text: str) -> str:
    """Return *text* up to the first special token that it spells."""
    for token in SpecialToken:
        text = text.partition(token)[0]
    return text


def extract_content_text(content: Content | None) -> str:
    """Return the text of a message's content.

    Raises:
        UsageError: The content has a part that is not text, such as an image.
    """
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.get("type") not in ("text", "input_text", "output_text"):
            raise UsageError(f"a content part of type {part.get('type')!r} is not text; use codec='chat' to carry it")
    return extract_text(content)


def format_tools(tools: Iterable[Item]) -> str:
    """Return the part of the system message that describes *tools*, given in the format of Chat Completions."""
    schemas = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        "# Tools\n\n"
        f"These functions are at your service, each described by its JSON Schema:\n<tools>\n{schemas}\n</tools>\n\n"
        "To call one, write its name and its arguments as a JSON object between tags; for several calls, several:\n"
        '<tool_call>\n{"name": "NAME", "arguments": {"KEY": "VALUE"}}\n</tool_call>'
    )


def format_tool_call(function: Item) -> str:
    """Return a tool call as a policy writes it; the arguments of *function* are JSON text or an object."""
    arguments = function.get("arguments") or {}
    arguments_text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    name = json.dumps(function.get("name"), ensure_ascii=False)
    return f'<tool_call>\n{{"name": {name}, "arguments": {arguments_text}}}\n</tool_call>'


def format_tool_response(output: str) -> str:
    """Return the *output* of a tool as a policy reads it."""
    return f"{TOOL_RESPONSE_TAGS[0]}\n{escape_tool_response_tags(output)}\n{TOOL_RESPONSE_TAGS[1]}"


def escape_tool_response_tags(text: str) -> str:
    """Escape the tags in *text* that would start or end a tool response."""
    return escape_markers(text, TOOL_RESPONSE_TAGS)


def escape_markers(text: str, markers: Collection[str]) -> str:
    """Insert a space after the first character of each of the *markers* in *text*, so that no marker remains."""
    return _compile_marker_starts(frozenset(markers)).sub(r"\g<0> ", text) if markers else text


@lru_cache(maxsize=32)
def _compile_marker_starts(markers: frozenset[str]) -> re.Pattern[str]:
    # The lookahead also finds a marker that begins within another one.
    return re.compile(f"(?={'|'.join(map(re.escape, sorted(markers)))}).", re.DOTALL)


def _get_role(message: Item) -> str:
    role = message.get("role")
    if role not in {"system", "developer", "user", "assistant", "tool"}:
        raise UsageError(
            f"unknown role {role!r} of a chat message; the roles are system, developer, user, assistant and tool"
        )
    return "system" if role == "developer" else str(role)


def _format_message(message: Item) -> str:
    text = extract_content_text(message.get("content"))
    if message["role"] == "tool":
        return format_tool_response(text)
    if message["role"] != "assistant":
        return escape_tool_response_tags(text)
    reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
    calls = [format_tool_call(call["function"]) for call in message.get("tool_calls") or []]
    return prepend_think_block(reasoning, "\n".join(filter(None, [text, *calls])))
