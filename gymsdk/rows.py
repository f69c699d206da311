"""Rows: JSON objects, one to a line of a JSONL file, read and written."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from gymsdk.errors import BadRow
from gymsdk.types import Row

BOM = b"\xef\xbb\xbf"
"""What some editors put before UTF-8."""


def read(path: Path) -> Iterator[tuple[int, Row]]:
    """Yield each row with its line number; raises `BadRow` at a line that is no JSON object."""
    for number, line in lines(path):
        yield number, parsed(line, where=f"{path}:{number}")


def lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not blank, numbered from 1."""
    try:
        with path.open("rb") as file:
            file.seek(len(BOM) if file.read(len(BOM)) == BOM else 0)
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
        raise BadRow(f"{where}: a row is a JSON object, this is a {type(row).__name__}; mend or remove the line")
    return row


def line(row: Row) -> bytes:
    """Give *row* as one line of JSONL."""
    return written(row) + b"\n"


def document(value: Any) -> bytes:
    """Give *value* as a JSON file for people."""
    return written(value, orjson.OPT_INDENT_2) + b"\n"


def written(value: Any, option: int = 0) -> bytes:
    """Give *value* as JSON; what JSON or UTF-8 cannot hold becomes null (NaN) or `?` (a lone surrogate)."""
    try:
        return orjson.dumps(value, option=option | orjson.OPT_NON_STR_KEYS)
    except orjson.JSONEncodeError:
        # Integers beyond 64 bits, lone surrogates and deep nesting are beyond orjson, not beyond JSON.
        return json.dumps(_finite(value), ensure_ascii=False, allow_nan=False).encode("utf-8", "replace")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
