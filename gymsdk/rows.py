"""Rows: JSON objects, one to a line of a JSONL file, read and written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import orjson

from gymsdk.errors import BadRow
from gymsdk.types import Row


def read(path: Path) -> Iterator[tuple[int, Row]]:
    """Yield each row with its line number; raises `BadRow` at a line that is no JSON object."""
    for number, line in lines(path):
        yield number, parsed(line, where=f"{path}:{number}")


def lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not blank, numbered from 1."""
    try:
        with path.open("rb") as file:
            yield from ((number, line) for number, line in enumerate(file, 1) if line.strip())
    except OSError as error:
        raise BadRow(f"{path}: {error.strerror or error}; name a JSONL file that can be read") from None


def parsed(line: bytes, *, where: str) -> Row:
    """Give the JSON object in *line*; raises `BadRow` that says *where*."""
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise BadRow(f"{where}: not valid JSON ({error}); mend or remove the line") from None
    if not isinstance(row, dict):
        raise BadRow(f"{where}: a row is a JSON object, this is a {type(row).__name__}")
    return row


def line(row: Row) -> bytes:
    """Give *row* as one line of JSONL; what UTF-8 cannot hold (a lone surrogate) becomes `?`."""
    try:
        return orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_NON_STR_KEYS)
    except orjson.JSONEncodeError:
        return (json.dumps(row, ensure_ascii=False) + "\n").encode("utf-8", "replace")
