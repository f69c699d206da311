"""Rows: JSON objects, one to a line of a JSONL file, read and written."""

from __future__ import annotations

import dataclasses
import enum
import json
import math
from collections.abc import Callable, Iterator
from datetime import date, time
from pathlib import Path
from typing import Any, TypeGuard
from uuid import UUID

import orjson

from gymsdk.errors import BadRow
from gymsdk.types import Row

MAX_INTEGER_DIGITS = 4300
"""Digits that an integer may have: Python's own limit, as converting decimal digits takes quadratic time."""

MIN_SAMPLED_BYTES = 4096
"""Bytes from which a text is sampled before it is searched."""

SAMPLE_STRIDE_BYTES = 6
"""Every so many bytes are sampled: at least three of them lie in 19 digits."""

# A number that begins a value stands behind one of these bytes. The digits of a fraction do not.
_NUMBER_PREFIXES = b"[,: \n\r\t-"
_BYTE_SHAPES = bytes(
    ord("0") if byte in b"0123456789" else ord("<") if byte in _NUMBER_PREFIXES else ord("x") for byte in range(256)
)
_LONG_INTEGER_SHAPE = b"<" + b"0" * 19
"""What an integer beyond 64 bits looks like: positive ones have 20 digits or more, negative ones 19."""


def parse_json(text: bytes | str, *, strict: bool = False) -> Any:
    """Return the JSON value in *text*.

    Args:
        text: UTF-8, or a string.
        strict: Refuse half of a surrogate pair, which a model may write and UTF-8 cannot hold.

    Raises:
        ValueError: *text* is no JSON, or one of its numbers is too large: an integer of more than `MAX_INTEGER_DIGITS`,
            or a float beyond a double.
    """
    data = text.encode() if isinstance(text, str) else text
    if _has_large_integer(data):
        return _parse_with_stdlib(data, strict=strict)
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        if strict or b"\\ud" not in data.lower():
            raise
    return _parse_with_stdlib(data, strict=False)


def dump_json(
    value: object,
    *,
    indent: bool = False,
    replace_surrogates: bool = False,
    default: Callable[[Any], Any] | None = None,
) -> bytes:
    """Return *value* as JSON; NaN and the infinities, for which JSON has no word, are null.

    Args:
        value: What JSON can hold; keys may be numbers.
        indent: Write it over many lines, for people.
        replace_surrogates: Write `?` for half of a surrogate pair, instead of an escape that many readers refuse.
        default: Returns what to write instead of something that JSON cannot hold.

    Raises:
        TypeError: JSON cannot hold *value*.
        ValueError: *value* contains itself, or an integer of more than `MAX_INTEGER_DIGITS`.
    """
    try:
        option = orjson.OPT_NON_STR_KEYS | (orjson.OPT_INDENT_2 if indent else 0)
        return orjson.dumps(value, default=default, option=option)
    except TypeError:
        pass
    try:
        plain = _convert_to_plain(value, default)
    except RecursionError:
        raise ValueError("the value contains itself, or is nested too deeply") from None
    text = json.dumps(plain, allow_nan=False, ensure_ascii=not replace_surrogates, indent=2 if indent else None)
    return text.encode("utf-8", "replace")


def dump_canonical_json(value: object) -> bytes:
    """Return *value* as JSON that is the same in whatever order its keys came."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except TypeError:
        return json.dumps(value, sort_keys=True).encode()


def is_finite_number(value: object) -> TypeGuard[float]:
    """Return whether *value* is a number that a double can hold: no NaN, no infinity, no larger integer."""
    try:
        return isinstance(value, (int, float)) and math.isfinite(value)
    except OverflowError:
        return False


def _has_large_integer(data: bytes) -> bool:
    """Whether *data* may hold an integer beyond 64 bits; a text inside it that looks like one counts too."""
    if len(data) > MIN_SAMPLED_BYTES and b"000" not in data[::SAMPLE_STRIDE_BYTES].translate(_BYTE_SHAPES):
        return False
    shape = data.translate(_BYTE_SHAPES)
    if shape.startswith(_LONG_INTEGER_SHAPE[1:]):
        return True
    at = shape.find(_LONG_INTEGER_SHAPE)
    while at >= 0:
        # 19 digits without a sign fit into 64 bits.
        if data.startswith(b"-", at) or shape.startswith(b"0", at + len(_LONG_INTEGER_SHAPE)):
            return True
        at = shape.find(_LONG_INTEGER_SHAPE, at + 1)
    return False


def _parse_with_stdlib(data: bytes, *, strict: bool) -> Any:
    try:
        value = json.loads(
            data.decode(), parse_int=_parse_integer, parse_float=_parse_float, parse_constant=_reject_constant
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if strict and b"\\ud" in data.lower():
        # Raises a ValueError for half of a surrogate pair.
        json.dumps(value, ensure_ascii=False).encode()
    return value


def _convert_to_plain(value: Any, default: Callable[[Any], Any] | None) -> Any:
    """Return *value* as the standard library writes it: what orjson writes by itself is converted as orjson does."""
    if isinstance(value, dict):
        return {_format_key(key): _convert_to_plain(each, default) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_convert_to_plain(each, default) for each in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: _convert_to_plain(each, default) for name, each in _iter_members(value)}
    return _convert_scalar(value, default)


def _convert_scalar(value: Any, default: Callable[[Any], Any] | None) -> Any:
    if isinstance(value, enum.Enum):
        return _convert_to_plain(value.value, default)
    if value is None or isinstance(value, (str, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, (date, time, UUID)):
        return orjson.loads(orjson.dumps(value))
    if default is None:
        raise TypeError(f"JSON cannot hold a value of type {type(value).__name__!r}")
    return _convert_to_plain(default(value), default)


def _iter_members(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a dataclass that orjson writes: those that are not private."""
    names = vars(value) if hasattr(value, "__dict__") else [each.name for each in dataclasses.fields(value)]
    return ((name, getattr(value, name)) for name in names if not name.startswith("_"))


def _format_key(key: Any) -> str:
    """Return the key of an object as orjson writes it."""
    plain = key.value if isinstance(key, enum.Enum) else key
    if isinstance(plain, str):
        return plain
    if isinstance(plain, int) and not isinstance(plain, bool):
        return str(int(plain))
    [name] = orjson.loads(orjson.dumps({plain: None}, option=orjson.OPT_NON_STR_KEYS))
    return str(name)


def _parse_integer(digits: str) -> int:
    if len(digits) > MAX_INTEGER_DIGITS:
        raise ValueError(f"an integer has {len(digits):,} digits; at most {MAX_INTEGER_DIGITS:,} are read")
    return int(digits)


def _parse_float(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError("a number is larger than the largest double")
    return number


def _reject_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


BOM = b"\xef\xbb\xbf"
"""What some editors put before UTF-8."""


def read_rows(path: Path) -> Iterator[tuple[int, Row]]:
    """Yield each row with its line number; raises `BadRow` at a line that is no JSON object."""
    for number, line in read_lines(path):
        yield number, parse_row(line, where=f"{path}:{number}")


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not blank, numbered from 1."""
    try:
        with path.open("rb") as file:
            file.seek(len(BOM) if file.read(len(BOM)) == BOM else 0)
            yield from ((number, line) for number, line in enumerate(file, 1) if line.strip())
    except OSError as error:
        raise BadRow(f"{path}: {error.strerror or error}; name a JSONL file that can be read") from None


def parse_row(line: bytes, *, where: str) -> Row:
    """Give the JSON object in *line*; raises `BadRow` that says *where*."""
    try:
        row = parse_json(line, strict=True)
    except ValueError as error:
        raise BadRow(f"{where}: not valid JSON ({error}); mend or remove the line") from None
    if not isinstance(row, dict):
        raise BadRow(f"{where}: a row is a JSON object, this is a {type(row).__name__}; mend or remove the line")
    return row


def dump_row(row: Row) -> bytes:
    """Give *row* as one line of JSONL."""
    return dump_portable_json(row) + b"\n"


def dump_document(value: Any) -> bytes:
    """Return *value* as a JSON file for people."""
    return dump_portable_json(value, indent=True) + b"\n"


def dump_portable_json(value: Any, *, indent: bool = False) -> bytes:
    """Return *value* as JSON that every reader takes: half of a surrogate pair, which many refuse, becomes `?`."""
    return dump_json(value, indent=indent, replace_surrogates=True)
