"""Rows: JSON objects, one to a line of a JSONL file, read and written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gymsdk import values
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
        row = values.parsed(line, strict=True)
    except ValueError as error:
        raise BadRow(f"{where}: not valid JSON ({error}); mend or remove the line") from None
    if not isinstance(row, dict):
        raise BadRow(f"{where}: a row is a JSON object, this is a {type(row).__name__}; mend or remove the line")
    return row


def line(row: Row) -> bytes:
    """Give *row* as one line of JSONL."""
    return written(row) + b"\n"


def document(value: Any) -> bytes:
    """Return *value* as a JSON file for people."""
    return written(value, indent=True) + b"\n"


def written(value: Any, *, indent: bool = False) -> bytes:
    """Return *value* as JSON that every reader takes: half of a surrogate pair, which many refuse, becomes `?`."""
    return values.written(value, indent=indent, replace_surrogates=True)
