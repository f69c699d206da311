"""JSON objects as policies write them: whole, or cut short, with a comma too many, or with the quotes of Python."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import NamedTuple

_STRING = r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?'
_STRICT = re.compile(rf"{_STRING}|[{{}}\[\]\\]|</?tool_call>", re.DOTALL)
_LENIENT = re.compile(rf"{_STRING}|{_STRING.replace(chr(34), chr(39))}|[{{}}\[\],:]", re.DOTALL)


class Written(NamedTuple):
    """An object as it was written: its *source*, and the source of each of its members' values."""

    source: str
    members: dict[str, str]

    def get_string(self, key: str) -> str | None:
        """Give the string that is the value of *key*, or `None` where it is something else."""
        return unquoted(self.members.get(key, ""))


def extent(text: str, start: int) -> int | None:
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


def objects(text: str) -> Iterator[Written]:
    """Yield the objects in *text*, alone, one after the other or in an array; the last may lack its end."""
    start = text.find("{")
    while start >= 0:
        written, end = _walked(text, start)
        yield written
        start = text.find("{", end)


def unquoted(source: str) -> str | None:
    """Give the string that *source* writes, or `None` where it writes none."""
    quote = source[:1]
    if quote not in {'"', "'"} or len(source) < 2 or source[-1] != quote:  # noqa: PLR2004  # two quotes
        return None
    try:
        value = json.loads(source)
    except ValueError:
        return source[1:-1]
    return value if isinstance(value, str) else None


def _walked(text: str, start: int) -> tuple[Written, int]:
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
    return Written(text[start:end], members), end


def _keep(members: dict[str, str], key: str | None, source: str) -> None:
    if key is not None:
        members[key] = source.strip()


def _key(source: str) -> str:
    stripped = source.strip()
    return unquoted(stripped) or stripped


def _is_json(source: str) -> bool:
    try:
        json.loads(source)
    except (ValueError, RecursionError):
        return False
    return True
