"""Render conversations as ChatML, with tools and tool calls in the Hermes format.

A turn is `<|im_start|>ROLE`, a line break, the text, `<|im_end|>` and a line break. Tool outputs are rendered in a
user turn. Earlier turns are never shortened, not even their reasoning. The rendering of a conversation therefore
starts with the rendering of each shorter conversation that it continues.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from itertools import groupby
from typing import Literal, NamedTuple, TypeAlias

from gymsdk import responses
from gymsdk.convert.content import prepend_think_block
from gymsdk.errors import UsageError
from gymsdk.types import Content, Item, extract_text

TOOL_CALL_START, TOOL_CALL_END = "<tool_call>", "</tool_call>"
THINK_START, THINK_END = "<think>", "</think>"

ARGUMENT_KEYS = ("arguments", "parameters")
"""The keys under which policies write the arguments of a call."""

SegmentKind: TypeAlias = Literal["reasoning", "call", "text"]

_TAG = re.compile(r"</?(?:think|tool_call)>")
_CALL_TAG = re.compile(r"</?tool_call>")
_WHITE_SPACE = re.compile(r"\s*+")

_STRING = r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?'
_STRICT_TOKEN = re.compile(rf"{_STRING}|[{{}}\[\]\\]|</?tool_call>", re.DOTALL)
_LENIENT_TOKEN = re.compile(rf"{_STRING}|{_STRING.replace(chr(34), chr(39))}|[{{}}\[\],:]", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A call of the tool *name*, with its *arguments* as the policy wrote them."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ParsedOutput:
    """The reasoning, the text and the tool calls of one turn."""

    reasoning: list[str]
    text: str
    calls: list[ParsedCall]

    def build_items(self, *, turn: int) -> list[Item]:
        """Return the output items of a Response: reasoning, text, calls. Their ids contain the number of the *turn*."""
        items = [responses.build_reasoning(*self.reasoning, id=f"rs_{turn}_0")] if self.reasoning else []
        if self.text.strip() or not (self.calls or self.reasoning):
            items.append(responses.build_message(self.text, id=f"msg_{turn}_{len(items)}"))
        return items + [
            responses.build_function_call(call.name, call.arguments, f"call_{turn}_{number}", id=f"fc_{turn}_{number}")
            for number, call in enumerate(self.calls, len(items))
        ]


def parse_output(text: str, *, thinking: bool = False) -> ParsedOutput:
    """Parse the *text* of one turn.

    Args:
        text: The decoded generation.
        thinking: Whether the prompt ends with an opening `<think>` tag, so that *text* starts with reasoning.

    Returns:
        The parts of the turn. Without tool calls the text is unchanged, except for white space after reasoning.
    """
    segments = [*split_segments(f"{THINK_START}{text}" if thinking else text)]
    reasoning = [
        stripped for segment in segments if segment.kind == "reasoning" and (stripped := segment.content.strip())
    ]
    parsed = [_parse_segment(segment) for segment in segments if segment.kind != "reasoning"]
    calls = [call for segment_calls, _ in parsed for call in segment_calls]
    remaining = "".join(text_part for _, text_part in parsed)
    if calls:
        return ParsedOutput(reasoning, remaining.strip(), calls)
    return ParsedOutput(reasoning, remaining if remaining == text else remaining.lstrip(), calls)


def _parse_segment(segment: Segment) -> tuple[list[ParsedCall], str]:
    """Return the calls of *segment* and the part of it that stays text."""
    if segment.kind == "text":
        return [], segment.content
    parsed = [(_parse_call(json_object), json_object) for json_object in find_objects(segment.content)]
    calls = [call for call, _ in parsed if call]
    if not calls:
        return [], segment.source
    return calls, "\n".join(json_object.source for call, json_object in parsed if not call)


def _parse_call(json_object: ParsedObject) -> ParsedCall | None:
    """Return the call that *json_object* describes, or `None` if it has no name."""
    name = json_object.get_string("name")
    if not name:
        return None
    arguments = next((json_object.members[key] for key in ARGUMENT_KEYS if key in json_object.members), "{}")
    unquoted = unquote(arguments)
    return ParsedCall(name, arguments if unquoted is None else unquoted)


class Segment(NamedTuple):
    """A section of *text* from *begin* to *end*: reasoning or a call with its tags, or the text between them.

    *content* is the section without its tags.
    """

    kind: SegmentKind
    text: str
    begin: int
    end: int
    content: str

    @property
    def source(self) -> str:
        """The section with its tags."""
        return self.text[self.begin : self.end]


def split_segments(text: str) -> Iterator[Segment]:
    """Yield the segments of *text* in order, which cover the whole text, in time linear in its length."""
    segment_start = position = 0
    first_word, last_think_end = _skip_white_space(text, 0), text.rfind(THINK_END)
    while tag := _TAG.search(text, position):
        if tag[0] == THINK_START:
            is_leading = tag.start() == first_word
            segment = _find_reasoning(text, tag, closed=tag.end() <= last_think_end, leading=is_leading)
        elif tag[0] == TOOL_CALL_START:
            segment = _find_call(text, tag)
        else:
            # Text that starts with reasoning has no opening tag if the prompt ends with the opening tag.
            opened_by_prompt = tag[0] == THINK_END and segment_start == 0
            segment = Segment("reasoning", text, 0, tag.end(), text[: tag.start()]) if opened_by_prompt else None
        position = segment.end if segment else tag.end()
        if segment:
            if segment_start < segment.begin:
                yield Segment("text", text, segment_start, segment.begin, text[segment_start : segment.begin])
            yield segment
            segment_start, first_word = position, _skip_white_space(text, position)
    if segment_start < len(text):
        yield Segment("text", text, segment_start, len(text), text[segment_start:])


def _find_reasoning(text: str, tag: re.Match[str], *, closed: bool, leading: bool) -> Segment | None:
    """Return the reasoning after an opening *tag*; without a closing tag, only if no text precedes the reasoning."""
    if not (closed or leading):
        return None
    content_end = text.index(THINK_END, tag.end()) if closed else len(text)
    end = content_end + len(THINK_END) if closed else content_end
    return Segment("reasoning", text, tag.start(), end, text[tag.end() : content_end])


def _find_call(text: str, tag: re.Match[str]) -> Segment:
    json_end = find_json_end(text, _skip_white_space(text, tag.end()))
    next_tag = _CALL_TAG.search(text, json_end or tag.end())
    if next_tag and next_tag[0] == TOOL_CALL_END:
        return Segment("call", text, tag.start(), next_tag.end(), text[tag.end() : next_tag.start()])
    # Without a closing tag, text after a complete object does not belong to the call.
    end = json_end or (next_tag.start() if next_tag else len(text))
    return Segment("call", text, tag.start(), end, text[tag.end() : end])


def _skip_white_space(text: str, start: int) -> int:
    match = _WHITE_SPACE.match(text, start)
    return match.end() if match else start


class ParsedObject(NamedTuple):
    """A JSON object as a policy wrote it: its *source* text, and the source text of each member's value.

    The object may be truncated, have a trailing comma, or use the quotes of Python.
    """

    source: str
    members: dict[str, str]

    def get_string(self, key: str) -> str | None:
        """Return the value of *key* if it is a string, else `None`."""
        return unquote(self.members.get(key, ""))


def find_json_end(text: str, start: int) -> int | None:
    """Return the end of the JSON object or array that starts at *start*, or `None` if the JSON is invalid."""
    if not text.startswith(("{", "["), start):
        return None
    depth = 0
    # The scan stops at the first invalid character, so that scans from many starts hardly ever overlap.
    for token in _STRICT_TOKEN.finditer(text, start):
        word = token[0]
        if word in "{[":
            depth += 1
        elif word in "}]":
            depth -= 1
            if depth == 0:
                return token.end() if _is_json(text[start : token.end()]) else None
        elif word[0] != '"':
            return None
    return None


def find_objects(text: str) -> Iterator[ParsedObject]:
    """Yield the objects in *text*, separate or in an array; the last one may be truncated."""
    start = text.find("{")
    while start >= 0:
        parsed, end = _parse_object(text, start)
        yield parsed
        start = text.find("{", end)


def unquote(source: str) -> str | None:
    """Return the value of a string in single or double quotes, or `None` if *source* is not a string."""
    quote = source[:1]
    if quote not in {'"', "'"} or len(source) < 2 or source[-1] != quote:  # noqa: PLR2004  # two quotes
        return None
    try:
        value = json.loads(source)
    except ValueError:
        return source[1:-1]
    return value if isinstance(value, str) else None


def _parse_object(text: str, start: int) -> tuple[ParsedObject, int]:
    """Return the object that starts at *start*, and the position of its end in *text*."""
    members: dict[str, str] = {}
    depth, key, member_start, end = 0, None, start + 1, len(text)
    for token in _LENIENT_TOKEN.finditer(text, start):
        word = token[0]
        depth += (word in {"{", "["}) - (word in {"}", "]"})
        if depth == 1 and word == ":" and key is None:
            key, member_start = _parse_key(text[member_start : token.start()]), token.end()
        elif (depth == 1 and word == ",") or depth == 0:
            if key is not None:
                members[key] = text[member_start : token.start()].strip()
            key, member_start = None, token.end()
        if depth == 0:
            end = token.end()
            break
    else:
        if key is not None:
            members[key] = text[member_start:].strip()
    return ParsedObject(text[start:end], members), end


def _parse_key(source: str) -> str:
    stripped = source.strip()
    return unquote(stripped) or stripped


def _is_json(source: str) -> bool:
    try:
        json.loads(source)
    except (ValueError, RecursionError):
        return False
    return True


TOOL_RESPONSE_TAGS = ("<tool_response>", "</tool_response>")
"""The tags around the output of a tool."""


class SpecialToken(StrEnum):
    """A token that marks the start or the end of a turn or a text."""

    TEXT_END = "<|endoftext|>"
    START = "<|im_start|>"
    END = "<|im_end|>"


Piece = SpecialToken | str
"""A special token, or plain text. Plain text may contain the characters of a special token."""


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
    turns = [(get_role(message), format_message(message)) for message in messages]
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
    """Return *pieces* as text. In plain text, the characters of special tokens are escaped."""
    runs = groupby(pieces, key=lambda piece: isinstance(piece, SpecialToken))
    return "".join(
        "".join(run) if is_special else escape_markers("".join(run), [*SpecialToken]) for is_special, run in runs
    )


def truncate_at_special_token(text: str) -> str:
    """Return *text* up to the first occurrence of a special token's characters."""
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
    # The lookahead also finds a marker that begins within another marker.
    return re.compile(f"(?={'|'.join(map(re.escape, sorted(markers)))}).", re.DOTALL)


def get_role(message: Item) -> str:
    """Return the role of a chat *message*; `developer` counts as `system`.

    Raises:
        UsageError: The role is unknown.
    """
    role = message.get("role")
    if role not in {"system", "developer", "user", "assistant", "tool"}:
        raise UsageError(
            f"unknown role {role!r} of a chat message; the roles are system, developer, user, assistant and tool"
        )
    return "system" if role == "developer" else str(role)


def format_message(message: Item) -> str:
    """Return the text of a chat *message*: reasoning in tags, text and tool calls; a tool output in its tags."""
    text = extract_content_text(message.get("content"))
    if message["role"] == "tool":
        return format_tool_response(text)
    if message["role"] != "assistant":
        return escape_tool_response_tags(text)
    reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
    calls = [format_tool_call(call["function"]) for call in message.get("tool_calls") or []]
    return prepend_think_block(reasoning, "\n".join(filter(None, [text, *calls])))
