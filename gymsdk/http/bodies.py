"""Parse large, untrusted JSON in bodies of HTTP messages without blocking the event loop.

A JSON text of a few megabytes can describe objects of gigabytes (`[[],[],…]` takes 30 times its size), and the parser
holds the interpreter's lock until it is done. This module rejects a text that is nested too deeply or has too many
values before it creates the objects. It parses a large text in another thread, piece by piece, so that the event loop
can run between two pieces.
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
"""The nesting depth of lists and objects: orjson's own limit, which holds for short texts."""

MAX_VALUES = 32 * 2**20
"""The number of values that a text of any size may have; see `get_max_values` for texts beyond 256 MiB."""

VALUES_PER_CONTAINER = 32
"""How many plain values a list or an object counts for: it takes about that much more memory."""

PLAIN_VALUE_BYTES, CONTAINER_BYTES = 40, 100
"""The approximate memory of a plain value, and of a list or an object."""

MIN_LARGE_BYTES = 256 * 1024
"""The size from which a text is parsed in a thread. A smaller text cannot have too many values."""

PIECE_BYTES = 256 * 1024
"""The approximate size of a piece, which takes a few milliseconds."""

MAX_WHOLE_BYTES, MAX_WHOLE_VALUES = 4 * 2**20, 2**19
"""The size and the number of values up to which a text is parsed at once, because that takes less than 20 ms.

These values are typical of a turn with 65,536 token ids and log-probabilities.
"""

MAX_THREADS = 2
"""The number of large texts that one process parses at once."""

COMMA_SAMPLE_STRIDE = 8
"""The distance of the bytes that are looked at for an estimate of the number of commas."""

Container: TypeAlias = "dict[str, object] | list[object]"

_STRING_OR_BRACKET = re.compile(rb'"[^"\\]*+"|["\[\]{}]')
"""A string without escapes, or the next byte that may begin or end a string, a list or an object."""

_NON_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_BRACKETS = (b"[", b"]", b"{", b"}")
_BRACKET_OR_COMMA = re.compile(rb"[\[\]{},]")
_WHITESPACE = b" \t\r\n"

_MAX_REDUCTIONS = 64
_TAIL_BYTES = 1024
_NEAR_BYTES = 256
_MAX_LOOK_BACK_BYTES = 64 * 1024


class TooComplex(ValueError):
    """A JSON text is nested too deeply or has too many values."""


def get_max_values(size: int) -> int:
    """Return the number of values that a text may have if texts of *size* bytes are allowed: one per 8 bytes."""
    return max(MAX_VALUES, size // 8)


async def loads_async(text: bytes, max_values: int = MAX_VALUES, *, strict: bool = False, exact: bool = True) -> object:
    """Return the JSON value in *text*; a large text is parsed in a thread.

    Args:
        text: UTF-8 JSON.
        max_values: The number of values that it may have; a list or an object counts for 32.
        strict: Reject unpaired surrogates, as in `gymsdk.jsonl.parse_json`.
        exact: Return integers beyond 64 bits in a large text exactly, as in `gymsdk.jsonl.parse_json`.

    Raises:
        TooComplex: It is nested more than 1024 levels deep, or has more than *max_values* values.
        ValueError: It is not JSON.
    """
    if len(text) < MIN_LARGE_BYTES:
        return loads(text, max_values, strict=strict)
    parse = partial(loads, text, max_values, strict=strict, exact=exact)
    return await asyncio.get_running_loop().run_in_executor(_get_executor(), parse)


async def loads_with_size(text: bytes, max_values: int = MAX_VALUES) -> tuple[object, int]:
    """Return the JSON value in *text* like `loads_async`, and its approximate memory in bytes; 0 for a short text."""
    if len(text) < MIN_LARGE_BYTES:
        return parse_json(text), 0
    parser = _PieceParser(text, max_values, is_measured=True)
    value = await asyncio.get_running_loop().run_in_executor(_get_executor(), parser.parse)
    return value, parser.memory


def loads(text: bytes, max_values: int = MAX_VALUES, *, strict: bool = False, exact: bool = True) -> object:
    """Return the JSON value in *text* like `loads_async`, in the calling thread."""
    if len(text) < MIN_LARGE_BYTES:
        return parse_json(text, strict=strict)
    value = _PieceParser(text, max_values, exact=exact).parse()
    if strict and b"\\ud" in text.lower():
        # Raises a ValueError for an unpaired surrogate.
        json.dumps(value, ensure_ascii=False).encode()
    return value


@cache
def _get_executor() -> ThreadPoolExecutor:
    # One for the process: the parsers of several loops hold one interpreter's lock.
    return ThreadPoolExecutor(MAX_THREADS, "gymsdk-json")


def _parse_piece(piece: bytes, *, exact: bool = True) -> object:
    """Parse *piece* with the garbage collector disabled, which would traverse all values again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return parse_json(piece, exact=exact)
    finally:
        if was_enabled:
            gc.enable()


class _OpenContainer:
    """A list or an object that is not complete yet.

    Attributes:
        at: Where the container begins.
        is_object: Whether it is an object.
        value: Its value, created once it turns out to be large.
        start: Where its unparsed rest begins.
        member: Where its current member begins.
        state: What precedes *start*: nothing (empty), a `comma`, or a `member`.
    """

    __slots__ = ("at", "is_object", "member", "start", "state", "value")

    def __init__(self, at: int, *, is_object: bool) -> None:
        self.at = at
        self.is_object = is_object
        self.start = self.member = at + 1
        self.state = ""
        self.value: Container | None = None


class _PieceParser:
    """Parses one large text piece by piece.

    If the next `PIECE_BYTES` end in the same container as they begin, they are parsed up to the last comma of that
    container. Otherwise a scan goes from bracket to bracket and keeps track of the open containers.
    """

    def __init__(self, text: bytes, max_values: int, *, is_measured: bool = False, exact: bool = True) -> None:
        self._exact = exact
        self._text = text
        self._values_left = max_values
        self._is_measured = is_measured
        self._open: list[_OpenContainer] = []
        self._root: Container | None = None
        self._at = 0
        self._commas = self._containers = 0
        self._counts_values = False

    @property
    def memory(self) -> int:
        """The approximate memory of the value in bytes; commas in strings are counted as values."""
        return len(self._text) + PLAIN_VALUE_BYTES * self._commas + CONTAINER_BYTES * self._containers

    def parse(self) -> object:
        """Return the value of the text; raises `ValueError`."""
        text = self._text
        is_short = len(text) <= MAX_WHOLE_BYTES
        # A text has fewer values than bytes.
        is_within_limit = len(text) <= self._values_left
        if is_short and is_within_limit and not self._is_measured and self._is_quick(_estimate_commas(text)):
            return _parse_piece(text, exact=self._exact)
        self._commas = sum(text.count(b",", at, at + PIECE_BYTES) for at in range(0, len(text), PIECE_BYTES))
        self._counts_values = self._commas > self._values_left
        if text.lstrip(_WHITESPACE)[:1] not in (b"[", b"{"):
            return parse_json(text)
        if is_short and self._is_quick(self._commas):
            return _parse_piece(text, exact=self._exact)
        self._containers = 0
        while self._at < len(text):
            closing = self._parse_next_piece() if self._open else 0
            if closing is not None:
                self._scan(self._at + PIECE_BYTES, len(self._open) - closing)
        if self._open or self._root is None:
            raise self._build_error(self._at)
        return self._root

    def _is_quick(self, commas: int) -> bool:
        """Return whether the whole text can be parsed at once, and count its lists and objects if it can."""
        max_values = min(MAX_WHOLE_VALUES, self._values_left)
        most = (max_values - commas) // VALUES_PER_CONTAINER
        self._containers = _count_up_to(most, self._text, b"[") + _count_up_to(most, self._text, b"{")
        return self._containers <= most

    def _parse_next_piece(self) -> int | None:
        """Parse the next piece at once, up to its last comma that belongs to the innermost container.

        Returns:
            `None` if the piece was parsed. Otherwise the number of containers that must end before that is possible, or
            0 if it is not possible in this piece.
        """
        innermost, window = self._open[-1], self._text[self._at : self._at + PIECE_BYTES]
        if b"\\" in window:
            window = window.replace(b"\\\\", b"__").replace(b'\\"', b"__")
        # Without escaped quotes, every other part between two quotes is inside a string.
        parts = window.split(b'"')
        outside = b"".join(parts[::2])
        brackets = outside.translate(None, _NON_BRACKETS)
        unpaired = _remove_pairs(brackets)
        opening = unpaired.lstrip(b"]}")
        if b"]" in opening or b"}" in opening:
            return 0
        if len(opening) != len(unpaired):
            return len(unpaired) - len(opening)
        last = _find_last_comma(parts, len(opening))
        if last is None:
            return 0
        end = self._at + last.at
        self._count_containers((len(brackets) - len(opening)) // 2 - last.ends)
        if self._counts_values:
            self._count_values(outside.count(b",") - last.commas)
        self._create_values(len(self._open))
        self._parse_members(innermost, end)
        self._at = innermost.member = end + 1
        return None

    def _scan(self, end: int, depth: int) -> None:
        """Go from bracket to bracket until *end*, or until at most *depth* containers are open."""
        text = self._text
        while self._at < min(end, len(text)):
            # The search also holds the interpreter's lock, so it covers at most one piece.
            match = _find_string_or_bracket(text, self._at, self._at + PIECE_BYTES)
            start, after = match.span() if match else (min(self._at + PIECE_BYTES, len(text)),) * 2
            if after - start == 1 and text[start] == ord('"'):
                after = self._find_end_of_string(after)
            self._process_between(self._at, start)
            self._at = after
            if start == after:
                continue
            if text[start] in b"[{":
                self._begin_container(start, is_object=text[start] == ord("{"))
            elif text[start] in b"]}":
                self._end_container(start, is_object=text[start] == ord("}"))
                if len(self._open) <= depth:
                    return
            elif not self._open:
                raise self._build_error(start)

    def _find_end_of_string(self, at: int) -> int:
        """Return the position after the closing quote of the string whose first character is *at*."""
        text, begin = self._text, at
        while (quote := text.find(b'"', at)) >= 0:
            before = quote
            while before > begin and text[before - 1] == ord("\\"):
                before -= 1
            if (quote - before) % 2 == 0:
                return quote + 1
            at = begin = quote + 1
        raise self._build_error(begin)

    def _process_between(self, begin: int, end: int) -> None:
        """Count the commas between two brackets or strings, and parse the members if they exceed a piece."""
        if not self._open:
            if self._text[begin:end].strip(_WHITESPACE):
                raise self._build_error(begin)
            return
        if self._counts_values:
            self._count_values(self._text.count(b",", begin, end))
        innermost = self._open[-1]
        comma = self._text.rfind(b",", begin, end)
        if comma < 0:
            return
        while comma - innermost.start > PIECE_BYTES:
            # A list of numbers has neither brackets nor strings, so it is split here.
            split = self._text.find(b",", max(begin, innermost.start + PIECE_BYTES), comma + 1)
            self._create_values(len(self._open))
            self._parse_members(innermost, split)
        innermost.member = comma + 1

    def _begin_container(self, at: int, *, is_object: bool) -> None:
        if not self._open and self._root is not None:
            raise self._build_error(at)
        if len(self._open) == MAX_DEPTH:
            raise TooComplex(f"it is nested more than {MAX_DEPTH} levels deep")
        self._count_containers(1)
        self._open.append(_OpenContainer(at, is_object=is_object))

    def _end_container(self, at: int, *, is_object: bool) -> None:
        if not self._open or self._open[-1].is_object != is_object:
            raise self._build_error(at)
        ended = self._open[-1]
        if ended.value is None and at - ended.at <= PIECE_BYTES and len(self._open) > 1:
            # A small container is parsed together with its parent's members.
            self._open.pop()
            return
        if ended.value is None:
            self._create_values(len(self._open))
        self._parse_members(ended, at, is_last=True)
        self._open.pop()
        if self._open:
            parent = self._open[-1]
            parent.start = parent.member = at + 1
            parent.state = "member"

    def _create_values(self, count: int) -> None:
        """Create the values of the outermost *count* open containers, each a member of the one before."""
        parent: _OpenContainer | None = None
        for container in self._open[:count]:
            if container.value is None:
                container.value = {} if container.is_object else []
                if parent is None:
                    self._root = container.value
                else:
                    self._add_child(parent, container)
            parent = container

    def _add_child(self, parent: _OpenContainer, child: _OpenContainer) -> None:
        """Add the value of *child* to the value of *parent*, after the members before it."""
        assert child.value is not None, "it was just created"
        if parent.member > parent.start:
            self._parse_members(parent, parent.member - 1)
        elif parent.state == "member":
            raise self._build_error(parent.start)
        lead = self._text[parent.start : child.at]
        if isinstance(parent.value, list):
            if lead.strip(_WHITESPACE):
                raise self._build_error(parent.start)
            parent.value.append(child.value)
        elif isinstance(parent.value, dict):
            if not lead.rstrip(_WHITESPACE).endswith(b":"):
                raise self._build_error(parent.start)
            keyed = _parse_piece(b"{%s0}" % lead, exact=self._exact)
            assert isinstance(keyed, dict), "the text has braces"
            parent.value[next(iter(keyed))] = child.value

    def _parse_members(self, container: _OpenContainer, end: int, *, is_last: bool = False) -> None:
        """Parse the members of *container* before *end*: a comma, or with *is_last* the container's own end."""
        piece = self._text[container.start : end]
        is_blank = not piece.strip(_WHITESPACE)
        if container.state == "member":
            if not is_blank and piece.lstrip(_WHITESPACE)[:1] != b",":
                raise self._build_error(container.start)
            piece = piece.lstrip(_WHITESPACE)[1:]
            if not is_blank and not piece.strip(_WHITESPACE):
                raise self._build_error(container.start)
        elif is_blank and (container.state == "comma" or not is_last):
            raise self._build_error(container.start)
        if not is_blank:
            if isinstance(container.value, list):
                elements = _parse_piece(b"[%s]" % piece, exact=self._exact)
                assert isinstance(elements, list), "the text has brackets"
                container.value += elements
            elif isinstance(container.value, dict):
                fields = _parse_piece(b"{%s}" % piece, exact=self._exact)
                assert isinstance(fields, dict), "the text has braces"
                container.value |= fields
        container.start, container.state = end + 1, "comma"

    def _count_containers(self, containers: int) -> None:
        self._containers += containers
        self._count_values(VALUES_PER_CONTAINER * containers)

    def _count_values(self, values: int) -> None:
        self._values_left -= values
        if self._values_left < 0:
            raise TooComplex("it has too many values; a list or an object counts for 32")

    def _build_error(self, at: int) -> ValueError:
        return ValueError(f"unexpected text near byte {at}")


def _estimate_commas(text: bytes) -> int:
    """Return about how many commas *text* has, from a sample, which takes a tenth of the time of counting them."""
    return COMMA_SAMPLE_STRIDE * text[::COMMA_SAMPLE_STRIDE].count(b",")


def _count_up_to(most: int, text: bytes, byte: bytes) -> int:
    """Return how often *byte* occurs in *text*, at most one more than *most*; quick if it is rare."""
    count, at = 0, text.find(byte)
    while at >= 0 and count <= most:
        count, at = count + 1, text.find(byte, at + 1)
    return count


@dataclass(frozen=True, slots=True)
class _Comma:
    """The last comma of a piece.

    Attributes:
        at: Its position in the piece.
        commas: The number of commas from it to the end of the piece, outside strings.
        ends: The number of containers that end after it.
    """

    at: int
    commas: int
    ends: int


def _find_string_or_bracket(text: bytes, start: int, end: int) -> re.Match[bytes] | None:
    """Return the first match of `_STRING_OR_BRACKET` between *start* and *end*."""
    near = start + _NEAR_BYTES
    match = _STRING_OR_BRACKET.search(text, start, min(near, end))
    if match or near >= end:
        return match
    # In a list of numbers, such as token ids, searching for single bytes is 20 times as fast as the pattern.
    first = end
    for byte in (b'"', *_BRACKETS):
        at = text.find(byte, near, first)
        first = first if at < 0 else at
    return _STRING_OR_BRACKET.search(text, first, end)


def _remove_pairs(brackets: bytes) -> bytes:
    """Return *brackets* without matching pairs; very deep nesting is left as it is after `_MAX_REDUCTIONS` rounds."""
    for _ in range(_MAX_REDUCTIONS):
        fewer = brackets.replace(b"[]", b"").replace(b"{}", b"")
        if len(fewer) == len(brackets):
            break
        brackets = fewer
    return brackets


def _find_last_comma(parts: list[bytes], depth: int) -> _Comma | None:
    """Find the last comma outside all containers that begin in a piece.

    Args:
        parts: The piece, split at its quotes.
        depth: The number of containers that are open at its end.

    Returns:
        `None` if there is none, or if it is more than `_MAX_LOOK_BACK_BYTES` from the end.
    """
    end, commas, ends, looked = sum(map(len, parts)) + len(parts) - 1, 0, 0, 0
    for number in range(len(parts) - 1, -1, -1):
        part = parts[number]
        begin = end - len(part)
        stop = len(part) if number % 2 == 0 else 0
        while stop:
            tail = max(0, stop - _TAIL_BYTES)
            if all(part.find(bracket, tail, stop) < 0 for bracket in _BRACKETS):
                # Lists of numbers, such as token ids, have many commas and no brackets.
                last = part.rfind(b",", tail, stop) if depth == 0 else -1
                if last >= 0:
                    return _Comma(begin + last, commas + 1, ends)
                commas += part.count(b",", tail, stop)
                looked, stop = looked + stop - tail, tail
                continue
            for match in reversed(list(_BRACKET_OR_COMMA.finditer(part, tail, stop))):
                byte = match[0]
                if byte == b",":
                    commas += 1
                    if depth == 0:
                        return _Comma(begin + match.start(), commas, ends)
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
