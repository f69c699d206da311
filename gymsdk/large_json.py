"""Large JSON: untrusted texts parsed within bounds, and without holding the event loop.

A JSON text of a few megabytes can describe objects of gigabytes (`[[],[],…]` takes 30 times its size), and the parser
keeps the interpreter's lock until it is done. Here a text is refused before its objects exist if it is nested too
deeply or has too many values, and a large one is parsed in another thread, piece by piece, so that the event loop gets
its turn between two pieces.
"""

from __future__ import annotations

import asyncio
import gc
import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from typing import TypeAlias

from gymsdk.jsonl import parse_json

MAX_DEPTH = 1024
"""Lists and objects that may contain one another: the parser's own limit, which holds for short texts."""

MAX_VALUES = 32 * 2**20
"""Values that a text may always have; a larger one than 256 MiB that somebody allows may have one for each 8 bytes."""

VALUES_PER_CONTAINER = 32
"""How many plain values a list or an object counts for: it takes about that much more memory."""

PLAIN_VALUE_BYTES, CONTAINER_BYTES = 40, 100
"""Bytes that a plain value takes in memory, and a list or an object, about."""

MIN_LARGE_BYTES = 256 * 1024
"""Bytes from which a text is parsed in a thread. No shorter one can have too many values."""

PIECE_BYTES = 256 * 1024
"""Bytes that are parsed at once, about: a few milliseconds."""

MAX_THREADS = 2
"""Large texts that are parsed at once in one process."""

Container: TypeAlias = "dict[str, object] | list[object]"

_STRING_OR_BRACKET = re.compile(rb'"[^"\\]*+"|["\[\]{}]')
"""A string without escapes, or the next byte that may begin or end a string, a list or an object."""

_NON_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_BRACKET_OR_COMMA = re.compile(rb"[\[\]{},]")
_WHITESPACE = b" \t\r\n"

_MAX_REDUCTIONS = 64
_TAIL_BYTES = 1024
_MAX_LOOK_BACK_BYTES = 64 * 1024


class TooComplex(ValueError):
    """A JSON text is nested too deeply or has too many values."""


def get_max_values(size: int) -> int:
    """Give how many values a text may have where texts of *size* bytes are allowed."""
    return max(MAX_VALUES, size // 8)


async def loads_async(text: bytes, max_values: int = MAX_VALUES, *, strict: bool = False) -> object:
    """Give the JSON value in *text*, parsed in a thread if it is large.

    Args:
        text: UTF-8 JSON.
        values: How many values it may have; a list or an object counts for 32.
        strict: Refuse half of a surrogate pair, as `gymsdk.jsonl.parse_json` does.

    Raises:
        TooComplex: It is nested more than 1024 levels deep, or has more than *values* values.
        ValueError: It is not JSON.
    """
    if len(text) < MIN_LARGE_BYTES:
        return loads(text, max_values, strict=strict)
    return await asyncio.get_running_loop().run_in_executor(
        _get_executor(), partial(loads, text, max_values, strict=strict)
    )


async def loads_with_size(text: bytes, values: int = MAX_VALUES) -> tuple[object, int]:
    """Give the JSON value in *text* like `loaded`, and about how many bytes it takes; 0 if the text is short."""
    if len(text) < MIN_LARGE_BYTES:
        return parse_json(text), 0
    pieces = _PieceParser(text, values)
    found = await asyncio.get_running_loop().run_in_executor(_get_executor(), pieces.value)
    return found, pieces.size


def loads(text: bytes, max_values: int = MAX_VALUES, *, strict: bool = False) -> object:
    """Return the JSON value in *text* like `loaded`, in the calling thread."""
    if len(text) < MIN_LARGE_BYTES:
        return parse_json(text, strict=strict)
    value = _PieceParser(text, max_values).value()
    if strict and b"\\ud" in text.lower():
        # Raises a ValueError for half of a surrogate pair.
        json.dumps(value, ensure_ascii=False).encode()
    return value


@cache
def _get_executor() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(MAX_THREADS, "gymsdk-json")


def _parse_piece(piece: bytes) -> object:
    """Parse *piece* with the garbage collector off: it would look through all values again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return parse_json(piece)
    finally:
        if was_enabled:
            gc.enable()


@dataclass(frozen=True, slots=True)
class _Comma:
    """Where the last comma of a piece is; from there on there are so many *commas* and *ends* of lists and objects."""

    at: int
    commas: int
    ends: int


def _remove_pairs(brackets: bytes) -> bytes:
    """Give *brackets* without those that enclose nothing but pairs; of very deep ones, as they are in the end."""
    for _ in range(_MAX_REDUCTIONS):
        fewer = brackets.replace(b"[]", b"").replace(b"{}", b"")
        if len(fewer) == len(brackets):
            break
        brackets = fewer
    return brackets


def _find_last_comma(parts: list[bytes], depth: int) -> _Comma | None:
    """Find the last comma outside of all lists and objects that begin in a piece of text.

    Args:
        parts: The piece, split at its quotes.
        depth: How many lists and objects are open at its end.

    Returns:
        `None` if there is none, or it is far from the end.
    """
    end, commas, ends, looked = sum(map(len, parts)) + len(parts) - 1, 0, 0, 0
    for number in range(len(parts) - 1, -1, -1):
        part = parts[number]
        begin = end - len(part)
        stop = len(part) if number % 2 == 0 else 0
        while stop:
            tail = max(0, stop - _TAIL_BYTES)
            for mark in reversed(list(_BRACKET_OR_COMMA.finditer(part, tail, stop))):
                byte = mark[0]
                if byte == b",":
                    commas += 1
                    if depth == 0:
                        return _Comma(begin + mark.start(), commas, ends)
                elif byte in b"]}":
                    depth, ends = depth + 1, ends + 1
                else:
                    depth -= 1
            looked += stop - tail
            stop = tail
        if looked > _MAX_LOOK_BACK_BYTES:
            return None
        end = begin - 1
    return None


class _OpenContainer:
    """A list or an object whose end has not come yet.

    Its *value* is made once it turns out to be large. *start* is where the part of it begins that is not in *value*
    yet, *member* where the member under way begins, *state* what stands before *start*: nothing, a comma, or a member.
    """

    __slots__ = ("at", "is_object", "member", "start", "state", "value")

    def __init__(self, at: int, *, is_object: bool) -> None:
        self.at = at
        self.is_object = is_object
        self.start = self.member = at + 1
        self.state = ""
        self.value: Container | None = None


class _PieceParser:
    """One large *text* while it is parsed.

    Where the next `PIECE` bytes end in the same list or object as they begin, they are parsed up to its last comma.
    Elsewhere a scan goes from bracket to bracket, and keeps account of what is open.
    """

    def __init__(self, text: bytes, values: int) -> None:
        self._text = text
        self._left = values
        self._open: list[_OpenContainer] = []
        self._root: Container | None = None
        self._at = 0
        self._commas = self._containers = 0
        self._is_exact = False

    @property
    def size(self) -> int:
        """About how many bytes the value takes, commas in strings taken for values."""
        return len(self._text) + PLAIN_VALUE_BYTES * self._commas + CONTAINER_BYTES * self._containers

    def value(self) -> object:
        """Give the value of the text; raises `ValueError`."""
        text = self._text
        self._commas = sum(text.count(b",", at, at + PIECE_BYTES) for at in range(0, len(text), PIECE_BYTES))
        self._is_exact = self._commas > self._left
        if text.lstrip(_WHITESPACE)[:1] not in (b"[", b"{"):
            return parse_json(text)
        while self._at < len(text):
            closing = self._skip() if self._open else 0
            if closing is not None:
                self._scan(self._at + PIECE_BYTES, len(self._open) - closing)
        if self._open or self._root is None:
            raise self._wrong(self._at)
        return self._root

    def _skip(self) -> int | None:
        """Parse the next piece at once, up to the last comma in it that belongs to what is innermost open.

        Returns:
            `None` if that could be done. Else how many lists and objects have to end before it can, 0 if not even then.
        """
        innermost, window = self._open[-1], self._text[self._at : self._at + PIECE_BYTES]
        if b"\\" in window:
            window = window.replace(b"\\\\", b"__").replace(b'\\"', b"__")
        # Without escaped quotes, every other part between two quotes is inside a string.
        parts = window.split(b'"')
        outside = b"".join(parts[::2])
        brackets = outside.translate(None, _NON_BRACKETS)
        rest = _remove_pairs(brackets)
        opened = rest.lstrip(b"]}")
        if b"]" in opened or b"}" in opened:
            return 0
        if len(opened) != len(rest):
            return len(rest) - len(opened)
        last = _find_last_comma(parts, len(opened))
        if last is None:
            return 0
        cut = self._at + last.at
        self._contains((len(brackets) - len(opened)) // 2 - last.ends)
        if self._is_exact:
            self._count(outside.count(b",") - last.commas)
        self._make(len(self._open))
        self._members(innermost, cut)
        self._at = innermost.member = cut + 1
        return None

    def _scan(self, end: int, depth: int) -> None:
        """Go from bracket to bracket until *end*, or until no more than *depth* lists and objects are open."""
        text, search = self._text, _STRING_OR_BRACKET.search
        while self._at < min(end, len(text)):
            # No further at once than a piece: the search, too, keeps the interpreter's lock.
            found = search(text, self._at, self._at + PIECE_BYTES)
            start, after = found.span() if found else (min(self._at + PIECE_BYTES, len(text)),) * 2
            if after - start == 1 and text[start] == ord('"'):
                after = self._end_of_string(after)
            self._between(self._at, start)
            self._at = after
            if start == after:
                continue
            if text[start] in b"[{":
                self._begin(start, is_object=text[start] == ord("{"))
            elif text[start] in b"]}":
                self._finish(start, is_object=text[start] == ord("}"))
                if len(self._open) <= depth:
                    return
            elif not self._open:
                raise self._wrong(start)

    def _end_of_string(self, at: int) -> int:
        """Give where the string ends whose first character is *at*, behind its quote."""
        text, begin = self._text, at
        while (quote := text.find(b'"', at)) >= 0:
            before = quote
            while before > begin and text[before - 1] == ord("\\"):
                before -= 1
            if (quote - before) % 2 == 0:
                return quote + 1
            at = begin = quote + 1
        raise self._wrong(begin)

    def _between(self, begin: int, end: int) -> None:
        """Take note of the commas in what stands between two marks, and parse what has become too much."""
        if not self._open:
            if self._text[begin:end].strip(_WHITESPACE):
                raise self._wrong(begin)
            return
        if self._is_exact:
            self._count(self._text.count(b",", begin, end))
        innermost = self._open[-1]
        comma = self._text.rfind(b",", begin, end)
        if comma < 0:
            return
        while comma - innermost.start > PIECE_BYTES:
            # A list of numbers has no marks in it: it is cut here.
            cut = self._text.find(b",", max(begin, innermost.start + PIECE_BYTES), comma + 1)
            self._make(len(self._open))
            self._members(innermost, cut)
        innermost.member = comma + 1

    def _begin(self, at: int, *, is_object: bool) -> None:
        if not self._open and self._root is not None:
            raise self._wrong(at)
        if len(self._open) == MAX_DEPTH:
            raise TooComplex(f"it is nested more than {MAX_DEPTH} levels deep")
        self._contains(1)
        self._open.append(_OpenContainer(at, is_object=is_object))

    def _finish(self, at: int, *, is_object: bool) -> None:
        if not self._open or self._open[-1].is_object != is_object:
            raise self._wrong(at)
        ended = self._open[-1]
        if ended.value is None and at - ended.at <= PIECE_BYTES and len(self._open) > 1:
            # It is small, and parsed with what it stands in.
            self._open.pop()
            return
        if ended.value is None:
            self._make(len(self._open))
        self._members(ended, at, last=True)
        self._open.pop()
        if self._open:
            outer = self._open[-1]
            outer.start = outer.member = at + 1
            outer.state = "member"

    def _make(self, count: int) -> None:
        """Make the values of the outermost *count* of what is open, each a member of the one before."""
        outer: _OpenContainer | None = None
        for each in self._open[:count]:
            if each.value is None:
                each.value = {} if each.is_object else []
                if outer is None:
                    self._root = each.value
                else:
                    self._add(outer, each)
            outer = each

    def _add(self, outer: _OpenContainer, inner: _OpenContainer) -> None:
        """Make the value of *inner* a member of that of *outer*, after the members that stand before it."""
        assert inner.value is not None, "it has just been made"
        if outer.member > outer.start:
            self._members(outer, outer.member - 1)
        elif outer.state == "member":
            raise self._wrong(outer.start)
        lead = self._text[outer.start : inner.at]
        if isinstance(outer.value, list):
            if lead.strip(_WHITESPACE):
                raise self._wrong(outer.start)
            outer.value.append(inner.value)
        elif isinstance(outer.value, dict):
            if not lead.rstrip(_WHITESPACE).endswith(b":"):
                raise self._wrong(outer.start)
            keyed = _parse_piece(b"{%s0}" % lead)
            assert isinstance(keyed, dict), "it stands in braces"
            outer.value[next(iter(keyed))] = inner.value

    def _members(self, into: _OpenContainer, end: int, *, last: bool = False) -> None:
        """Parse what *into* has before *end*: a comma, or its own end if it is the *last* of it."""
        piece = self._text[into.start : end]
        is_blank = not piece.strip(_WHITESPACE)
        if into.state == "member":
            if not is_blank and piece.lstrip(_WHITESPACE)[:1] != b",":
                raise self._wrong(into.start)
            piece = piece.lstrip(_WHITESPACE)[1:]
            if not is_blank and not piece.strip(_WHITESPACE):
                raise self._wrong(into.start)
        elif is_blank and (into.state == "comma" or not last):
            raise self._wrong(into.start)
        if not is_blank:
            if isinstance(into.value, list):
                more = _parse_piece(b"[%s]" % piece)
                assert isinstance(more, list), "it stands in brackets"
                into.value += more
            elif isinstance(into.value, dict):
                fields = _parse_piece(b"{%s}" % piece)
                assert isinstance(fields, dict), "it stands in braces"
                into.value |= fields
        into.start, into.state = end + 1, "comma"

    def _contains(self, containers: int) -> None:
        self._containers += containers
        self._count(VALUES_PER_CONTAINER * containers)

    def _count(self, values: int) -> None:
        self._left -= values
        if self._left < 0:
            raise TooComplex("it has too many values; a list or an object counts for 32")

    def _wrong(self, at: int) -> ValueError:
        return ValueError(f"unexpected text near byte {at}")
