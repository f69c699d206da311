"""Parse the output of a policy in the Hermes format into reasoning, text and tool calls.

Tool calls: every object with a name between `<tool_call>` and its end is a call. Its arguments are kept verbatim, even
if they are invalid, so that the environment can report the error. An object without a name stays text. A
call ends where its JSON ends; if the JSON cannot be parsed, at the next tag of a call or at the end of the text.
Parsing raises no errors. It drops only text beside a named object within the tags of its call.

Reasoning: the text between `<think>` and `</think>`, outside of calls. Without a closing tag the reasoning extends to
the end of the text, but only if no other text precedes it. Without an opening tag, which a prompt may already contain,
the reasoning starts with the text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from gymsdk import responses
from gymsdk.types import Item

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
    reasoning = [stripped for each in segments if each.kind == "reasoning" and (stripped := each.content.strip())]
    parsed = [_parse_segment(each) for each in segments if each.kind != "reasoning"]
    calls = [call for found, _ in parsed for call in found]
    remaining = "".join(rest for _, rest in parsed)
    if calls:
        return ParsedOutput(reasoning, remaining.strip(), calls)
    return ParsedOutput(reasoning, remaining if remaining == text else remaining.lstrip(), calls)


def _parse_segment(segment: Segment) -> tuple[list[ParsedCall], str]:
    """Return the calls of *segment* and the part of it that stays text."""
    if segment.kind == "text":
        return [], segment.content
    parsed = [(_parse_call(each), each) for each in find_objects(segment.content)]
    calls = [call for call, _ in parsed if call]
    if not calls:
        return [], segment.source
    return calls, "\n".join(each.source for call, each in parsed if not call)


def _parse_call(found: ParsedObject) -> ParsedCall | None:
    name = found.get_string("name")
    if not name:
        return None
    arguments = next((found.members[key] for key in ARGUMENT_KEYS if key in found.members), "{}")
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
    """Yield the segments of *text* in order; together they cover all of it. Takes time linear in its length."""
    done = position = 0
    first_word, last_think_end = _skip_white_space(text, 0), text.rfind(THINK_END)
    while tag := _TAG.search(text, position):
        if tag[0] == THINK_START:
            is_leading = tag.start() == first_word
            segment = _find_reasoning(text, tag, closed=tag.end() <= last_think_end, leading=is_leading)
        elif tag[0] == TOOL_CALL_START:
            segment = _find_call(text, tag)
        else:
            # The prompt may contain the opening tag of this reasoning.
            opened_by_prompt = tag[0] == THINK_END and done == 0
            segment = Segment("reasoning", text, 0, tag.end(), text[: tag.start()]) if opened_by_prompt else None
        position = segment.end if segment else tag.end()
        if segment:
            if done < segment.begin:
                yield Segment("text", text, done, segment.begin, text[done : segment.begin])
            yield segment
            done, first_word = position, _skip_white_space(text, position)
    if done < len(text):
        yield Segment("text", text, done, len(text), text[done:])


def _find_reasoning(text: str, tag: re.Match[str], *, closed: bool, leading: bool) -> Segment | None:
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
    found = _WHITE_SPACE.match(text, start)
    return found.end() if found else start


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
    """Return the end of the JSON object or array that starts at *start*, `None` if there is no valid one."""
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
        found, end = _parse_object(text, start)
        yield found
        start = text.find("{", end)


def unquote(source: str) -> str | None:
    """Return the string that *source* writes in single or double quotes, `None` if it is no string."""
    quote = source[:1]
    if quote not in {'"', "'"} or len(source) < 2 or source[-1] != quote:  # noqa: PLR2004  # two quotes
        return None
    try:
        value = json.loads(source)
    except ValueError:
        return source[1:-1]
    return value if isinstance(value, str) else None


def _parse_object(text: str, start: int) -> tuple[ParsedObject, int]:
    """Parse the object that starts at *start*; return it and its end."""
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
