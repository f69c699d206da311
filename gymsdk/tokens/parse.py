"""What a policy wrote in the Hermes form, taken apart: its thoughts, its text, its calls of tools.

One rule holds for calls. Between `<tool_call>` and its end every object with a name is a call, its arguments verbatim
whatever they are, so that the environment can say what is wrong with them; an object without a name stays text. A call
ends where its JSON ends, and where that cannot be read at the next tag of a call, or at the end of the text. Nothing is
raised, and nothing is lost but the scribble beside a named object within the tags of its call.

Thoughts stand between `<think>` and `</think>`, outside of calls. Without their end they go on to the end of the text,
if no words are before them; without their beginning, as a prompt may have it, they begin with the text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from gymsdk import responses
from gymsdk.types import Item

_STRING = r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?'
_STRICT = re.compile(rf"{_STRING}|[{{}}\[\]\\]|</?tool_call>", re.DOTALL)
_LENIENT = re.compile(rf"{_STRING}|{_STRING.replace(chr(34), chr(39))}|[{{}}\[\],:]", re.DOTALL)


class ParsedObject(NamedTuple):
    """An object as it was written: its *source*, and the source of each of its members' values."""

    source: str
    members: dict[str, str]

    def get_string(self, key: str) -> str | None:
        """Give the string that is the value of *key*, or `None` where it is something else."""
        return unquote(self.members.get(key, ""))


def find_json_end(text: str, start: int) -> int | None:
    """Give where the JSON that begins at *start* ends, or `None` where what is there is none."""
    if not text.startswith(("{", "["), start):
        return None
    depth = 0
    # Whatever is no JSON ends the walk at once: walks from many starts then hardly ever go over the same text.
    for token in _STRICT.finditer(text, start):
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
    """Yield the objects in *text*, alone, one after the other or in an array; the last may lack its end."""
    start = text.find("{")
    while start >= 0:
        written, end = _walked(text, start)
        yield written
        start = text.find("{", end)


def unquote(source: str) -> str | None:
    """Give the string that *source* writes, or `None` where it writes none."""
    quote = source[:1]
    if quote not in {'"', "'"} or len(source) < 2 or source[-1] != quote:  # noqa: PLR2004  # two quotes
        return None
    try:
        value = json.loads(source)
    except ValueError:
        return source[1:-1]
    return value if isinstance(value, str) else None


def _walked(text: str, start: int) -> tuple[ParsedObject, int]:
    """The object that begins at *start*, and where it ends."""
    members: dict[str, str] = {}
    depth, key, begun, end = 0, None, start + 1, len(text)
    for token in _LENIENT.finditer(text, start):
        word = token[0]
        depth += (word in {"{", "["}) - (word in {"}", "]"})
        if depth == 1 and word == ":" and key is None:
            key, begun = _key(text[begun : token.start()]), token.end()
        elif (depth == 1 and word == ",") or depth == 0:
            _keep(members, key, text[begun : token.start()])
            key, begun = None, token.end()
        if depth == 0:
            end = token.end()
            break
    else:
        _keep(members, key, text[begun:])
    return ParsedObject(text[start:end], members), end


def _keep(members: dict[str, str], key: str | None, source: str) -> None:
    if key is not None:
        members[key] = source.strip()


def _key(source: str) -> str:
    stripped = source.strip()
    return unquote(stripped) or stripped


def _is_json(source: str) -> bool:
    try:
        json.loads(source)
    except (ValueError, RecursionError):
        return False
    return True


SegmentKind: TypeAlias = Literal["thought", "call", "text"]

TOOL_CALL_START, TOOL_CALL_END = "<tool_call>", "</tool_call>"
"""The tags around a call."""

_THOUGHT = "</think>"
_TAG = re.compile(r"</?(?:think|tool_call)>")
_CALL = re.compile(r"</?tool_call>")
_BLANK = re.compile(r"\s*+")


class Segment(NamedTuple):
    """What stands from *begin* to *end* of a *text*: of which *kind*, and the *words* between its tags."""

    kind: SegmentKind
    text: str
    begin: int
    end: int
    words: str

    @property
    def source(self) -> str:
        """The words with the tags around them."""
        return self.text[self.begin : self.end]


def split_segments(text: str) -> Iterator[Segment]:
    """Yield the stretches of *text* in order, in time that grows as its length does; together they are all of it."""
    done = at = 0
    word, last = _past_blank(text, 0), text.rfind(_THOUGHT)
    while tag := _TAG.search(text, at):
        if tag[0] == "<think>":
            found = _thought(text, tag, closed=tag.end() <= last, leading=tag.start() == word)
        elif tag[0] == TOOL_CALL_START:
            found = _call(text, tag)
        else:
            # A prompt may have opened the thoughts that end here.
            begun = tag[0] == _THOUGHT and done == 0
            found = Segment("thought", text, 0, tag.end(), text[: tag.start()]) if begun else None
        at = found.end if found else tag.end()
        if found:
            if done < found.begin:
                yield Segment("text", text, done, found.begin, text[done : found.begin])
            yield found
            done, word = at, _past_blank(text, at)
    if done < len(text):
        yield Segment("text", text, done, len(text), text[done:])


def _thought(text: str, tag: re.Match[str], *, closed: bool, leading: bool) -> Segment | None:
    if not (closed or leading):
        return None
    stop = text.index(_THOUGHT, tag.end()) if closed else len(text)
    end = stop + len(_THOUGHT) if closed else stop
    return Segment("thought", text, tag.start(), end, text[tag.end() : stop])


def _call(text: str, tag: re.Match[str]) -> Segment:
    whole = find_json_end(text, _past_blank(text, tag.end()))
    following = _CALL.search(text, whole or tag.end())
    if following and following[0] == TOOL_CALL_END:
        return Segment("call", text, tag.start(), following.end(), text[tag.end() : following.start()])
    # No tag closes it: what comes after a whole object is no part of the call.
    stop = whole or (following.start() if following else len(text))
    return Segment("call", text, tag.start(), stop, text[tag.end() : stop])


def _past_blank(text: str, start: int) -> int:
    found = _BLANK.match(text, start)
    return found.end() if found else start


ARGUMENT_KEYS = ("arguments", "parameters")
"""What policies call the arguments."""


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A call of the tool *name*, its *arguments* as they were written."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ParsedOutput:
    """What a policy wrote, taken apart."""

    reasoning: list[str]
    text: str
    calls: list[ParsedCall]

    def build_items(self, *, turn: int) -> list[Item]:
        """Give the output items, thoughts, text, calls, with the ids that are those of the *turn*."""
        found = [responses.build_reasoning(*self.reasoning, id=f"rs_{turn}_0")] if self.reasoning else []
        if self.text.strip() or not (self.calls or self.reasoning):
            found.append(responses.build_message(self.text, id=f"msg_{turn}_{len(found)}"))
        return found + [
            responses.build_function_call(call.name, call.arguments, f"call_{turn}_{number}", id=f"fc_{turn}_{number}")
            for number, call in enumerate(self.calls, len(found))
        ]


def parse_output(written: str, *, thinking: bool = False) -> ParsedOutput:
    """Give what a policy wrote taken apart; *thinking* says that the prompt has opened its thoughts."""
    found = [*split_segments(f"<think>{written}" if thinking else written)]
    thoughts = [thought for each in found if each.kind == "thought" and (thought := each.words.strip())]
    read = [_read(each) for each in found if each.kind != "thought"]
    calls = [call for each, _ in read for call in each]
    text = "".join(rest for _, rest in read)
    if calls:
        return ParsedOutput(thoughts, text.strip(), calls)
    # A plain reply is kept to the letter; the blank after thoughts is no part of it.
    return ParsedOutput(thoughts, text if text == written else text.lstrip(), calls)


def _read(stretch: Segment) -> tuple[list[ParsedCall], str]:
    """The calls of a stretch, and what of it stays text."""
    if stretch.kind == "text":
        return [], stretch.words
    found = [(_named(each), each) for each in find_objects(stretch.words)]
    calls = [call for call, _ in found if call]
    if not calls:
        return [], stretch.source
    return calls, "\n".join(each.source for call, each in found if not call)


def _named(written: ParsedObject) -> ParsedCall | None:
    name = written.get_string("name")
    if not name:
        return None
    given = next((written.members[key] for key in ARGUMENT_KEYS if key in written.members), "{}")
    text = unquote(given)
    return ParsedCall(name, given if text is None else text)
