"""ChatML: a conversation as turns between marks, its tools and their calls in the Hermes form.

A turn is `<|im_start|>ROLE`, a line break, the words, `<|im_end|>` and a line break. What tools put out is in a turn of
the user's. Nothing that was said is left out later on, thoughts included: a conversation only ever grows at its end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator
from enum import StrEnum
from functools import lru_cache
from itertools import groupby

from gymsdk.convert import content as parts
from gymsdk.errors import UsageError
from gymsdk.types import Content, Item, extract_text


def escape_markers(text: str, marks: Collection[str]) -> str:
    """Give *text* with a space after the first character of each of the *marks* in it: then it is none any more."""
    return _beginning(frozenset(marks)).sub(r"\g<0> ", text) if marks else text


@lru_cache(maxsize=32)
def _beginning(marks: frozenset[str]) -> re.Pattern[str]:
    # Looking ahead finds a mark that begins within another, too.
    return re.compile(f"(?={'|'.join(map(re.escape, sorted(marks)))}).", re.DOTALL)


TOOL_RESPONSE_TAGS = ("<tool_response>", "</tool_response>")
"""The tags around the output of a tool."""


def format_tools(tools: Iterable[Item]) -> str:
    """Give the words of the system that offer *tools*, in the shape of OpenAI's chat."""
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        "# Tools\n\n"
        f"These functions are at your service, each described by its JSON Schema:\n<tools>\n{listed}\n</tools>\n\n"
        "To call one, write its name and its arguments as a JSON object between tags; for several calls, several:\n"
        '<tool_call>\n{"name": "NAME", "arguments": {"KEY": "VALUE"}}\n</tool_call>'
    )


def format_tool_call(function: Item) -> str:
    """Give a call as a policy writes it; *function* has a name, and arguments as JSON text or as an object."""
    arguments = function.get("arguments") or {}
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    name = json.dumps(function.get("name"), ensure_ascii=False)
    return f'<tool_call>\n{{"name": {name}, "arguments": {written}}}\n</tool_call>'


def format_tool_response(output: str) -> str:
    """Give the *output* of a tool as a policy reads it."""
    return f"{TOOL_RESPONSE_TAGS[0]}\n{escape_tool_response_tags(output)}\n{TOOL_RESPONSE_TAGS[1]}"


def escape_tool_response_tags(words: str) -> str:
    """Give *words* that cannot be taken for the output of a tool, nor end one."""
    return escape_markers(words, TOOL_RESPONSE_TAGS)


class SpecialToken(StrEnum):
    """What structures the conversation, beside its words."""

    TEXT_END = "<|endoftext|>"
    START = "<|im_start|>"
    END = "<|im_end|>"


Piece = SpecialToken | str
"""A mark, or words: a word that spells a mark is none."""


def render_pieces(
    messages: Iterable[Item], *, tools: Iterable[Item] | None = None, add_generation_prompt: bool = False
) -> Iterator[Piece]:
    """Yield the marks and words of chat *messages*; raises `UsageError` for what is not text."""
    turns = [(_role(message), _words(message)) for message in messages]
    if tools := list(tools or []):
        offer = format_tools(tools)
        first = turns.pop(0)[1] if turns and turns[0][0] == "system" else ""
        turns.insert(0, ("system", f"{first}\n\n{offer}" if first else offer))
    for role, run in groupby(turns, key=lambda turn: turn[0]):
        said = [words for _, words in run]
        for words in ["\n".join(said)] if role == "tool" else said:
            yield from (SpecialToken.START, f"{'user' if role == 'tool' else role}\n", words, SpecialToken.END, "\n")
    if add_generation_prompt:
        yield from (SpecialToken.START, "assistant\n")


def join_pieces(pieces: Iterable[Piece]) -> str:
    """Give the text of *pieces*; words that spell a mark have a space put after their `<`."""
    runs = groupby(pieces, key=lambda piece: isinstance(piece, SpecialToken))
    return "".join(
        joined if marks else escape_markers(joined, [*SpecialToken]) for marks, run in runs for joined in ["".join(run)]
    )


def truncate_at_special_token(written: str) -> str:
    """Give what of *written* stands before the first mark spelled in it, all of it where none is."""
    for mark in SpecialToken:
        written = written.partition(mark)[0]
    return written


def extract_content_text(given: Content | None) -> str:
    """Give the text of a message's content; raises `UsageError` where it is not text alone."""
    if given is None or isinstance(given, str):
        return given or ""
    for part in given:
        if part.get("type") not in ("text", "input_text", "output_text"):
            raise UsageError(f"a content part of type {part.get('type')!r} is no text; codec='chat' can carry it")
    return extract_text(given)


def _role(message: Item) -> str:
    role = message.get("role")
    if role not in {"system", "developer", "user", "assistant", "tool"}:
        raise UsageError(f"a chat message has no role {role!r}; it is system, developer, user, assistant or tool")
    return "system" if role == "developer" else str(role)


def _words(message: Item) -> str:
    words = extract_content_text(message.get("content"))
    if message["role"] == "tool":
        return format_tool_response(words)
    if message["role"] != "assistant":
        return escape_tool_response_tags(words)
    thought = message.get("reasoning_content") or message.get("reasoning") or ""
    calls = [format_tool_call(call["function"]) for call in message.get("tool_calls") or []]
    return parts.prepend_think_block(thought, "\n".join(filter(None, [words, *calls])))
