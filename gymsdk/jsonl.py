"""Read and write JSON and JSONL files without loss.

orjson reads an integer beyond 64 bits as a float, and does not write one; it neither reads nor writes an unpaired
surrogate. This module falls back to the standard library for these values. All JSON of gymsdk goes through this module.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
from collections.abc import Callable, Hashable, Iterator
from copy import deepcopy
from datetime import date, time
from pathlib import Path
from typing import Any, TypeGuard
from uuid import UUID

import orjson

from gymsdk.errors import BadRow, GymsdkError
from gymsdk.types import Row
from gymsdk.working_folder import shorten_path

MAX_INTEGER_DIGITS = 4300
"""The number of digits of an integer: Python's own limit, because conversion takes quadratic time."""

MIN_SAMPLED_BYTES = 4096
"""The size of a text that is sampled before it is searched for large integers."""

SAMPLE_STRIDE_BYTES = 6
"""The distance of the sampled bytes; at least three of them lie within 19 digits."""

READ_BUFFER_BYTES = 2**20
"""The size of the buffer of a file that is read line by line.

A thread gives up the interpreter lock for each read of the file and takes it again at once. With the usual buffer, it
reads every few microseconds, and another thread that needs the lock may wait for a quarter of a second.
"""

BOM = b"\xef\xbb\xbf"
"""The byte order mark that some editors write at the start of UTF-8 files."""

# A number at the start of a value follows one of these bytes. The digits of a fraction do not.
_NUMBER_PREFIXES = b"[,: \n\r\t-"
_BYTE_SHAPES = bytes(
    ord("0") if byte in b"0123456789" else ord("<") if byte in _NUMBER_PREFIXES else ord("x") for byte in range(256)
)
_LONG_INTEGER_SHAPE = b"<" + b"0" * 19
"""The shape of an integer beyond 64 bits: a positive one has at least 20 digits, a negative one at least 19."""


_LOG_PROBS = b'"generation_log_probs":['
"""The start of a list of log-probabilities: megabytes of long decimals, among which the search finds nothing else."""

_CONTAINERS = frozenset({dict, list})


class NestingError(GymsdkError, ValueError, RecursionError):
    """A value contains itself, or is nested too deeply for JSON."""


def copy_json(value: Any) -> Any:
    """Return a deep copy of a JSON *value*: new objects and arrays, the same texts and numbers."""
    if type(value) is dict:
        return {key: copy_json(member) if type(member) in _CONTAINERS else member for key, member in value.items()}
    if type(value) is list:
        return [copy_json(member) if type(member) in _CONTAINERS else member for member in value]
    return deepcopy(value)


def parse_json(text: bytes | str, *, strict: bool = False, exact: bool = True) -> Any:
    """Return the JSON value in *text*.

    Args:
        text: UTF-8 bytes, or a string.
        strict: Reject unpaired surrogates, which a model may write and UTF-8 cannot represent.
        exact: Return integers beyond 64 bits exactly, except in a long list `generation_log_probs`; otherwise as
            floats, without a search that takes as long as half of the parsing.

    Raises:
        ValueError: *text* is not JSON, or a number is too large: an integer of more than `MAX_INTEGER_DIGITS` digits,
            or a float beyond the range of a double.
    """
    data = text.encode() if isinstance(text, str) else text
    if exact and _has_large_integer(data):
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
    """Return *value* as JSON; NaN and infinities, which JSON does not have, become null.

    Args:
        value: The value; keys may be numbers.
        indent: Write the value on several lines.
        replace_surrogates: Write `?` for an unpaired surrogate instead of an escape, which many readers reject.
        default: Converts an object that JSON does not support to a supported object.

    Raises:
        TypeError: JSON does not support *value*.
        NestingError: *value* contains itself, or is nested too deeply.
        ValueError: *value* holds an integer of more than `MAX_INTEGER_DIGITS` digits.
    """
    option = orjson.OPT_INDENT_2 if indent else 0
    try:
        return orjson.dumps(value, default=default, option=option)
    except TypeError:
        pass
    try:
        # Keys that are not strings are rare, and this option makes every key slower.
        return orjson.dumps(value, default=default, option=option | orjson.OPT_NON_STR_KEYS)
    except TypeError:
        pass
    try:
        plain = _convert_to_plain(value, default)
    except RecursionError:
        raise NestingError("the value contains itself, or is nested too deeply") from None
    text = json.dumps(plain, allow_nan=False, ensure_ascii=not replace_surrogates, indent=2 if indent else None)
    return text.encode("utf-8", "replace")


def measure_depth(value: object) -> int:
    """Return how deeply the lists and mappings in a JSON value are nested; 0 for a value that is neither.

    Args:
        value: The value; it must not contain itself.
    """
    depth, level = 0, [value]
    while level := [node for node in level if isinstance(node, list | dict) and node]:
        depth += 1
        level = [child for node in level for child in (node.values() if isinstance(node, dict) else node)]
    return depth


def dump_portable_json(value: Any, *, indent: bool = False) -> bytes:
    """Return *value* as JSON that every reader accepts: unpaired surrogates become `?`."""
    return dump_json(value, indent=indent, replace_surrogates=True)


def dump_canonical_json(value: object) -> bytes:
    """Return *value* as JSON with sorted keys, so that equal values give equal bytes."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except TypeError:
        return json.dumps(value, sort_keys=True).encode()


def freeze_json(value: Any) -> Hashable:
    """Return a JSON value as a hashable one; 1 and 1.0 are equal, 1 and true are not.

    Raises:
        RecursionError: The value is nested too deeply.
    """
    if isinstance(value, dict):
        return frozenset((key, freeze_json(member)) for key, member in value.items())
    if isinstance(value, list):
        return tuple(map(freeze_json, value))
    return (bool, value) if isinstance(value, bool) else value


def dump_document(value: Any) -> bytes:
    """Return *value* as an indented JSON file."""
    return dump_portable_json(value, indent=True) + b"\n"


def dump_row(row: Row) -> bytes:
    """Return *row* as a line of JSONL."""
    return dump_portable_json(row) + b"\n"


def read_rows(path: Path) -> Iterator[tuple[int, Row]]:
    """Yield the rows of a JSONL file with their line numbers.

    Args:
        path: The file.

    Yields:
        Pairs of a line number, from 1, and the row.

    Raises:
        BadRow: The file cannot be read, or a line is not a JSON object.
    """
    for number, line in read_lines(path):
        yield number, parse_row(line, where=f"{shorten_path(path)}:{number}")


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file that are not blank, numbered from 1; raises `BadRow` if it cannot be read."""
    try:
        with path.open("rb", buffering=READ_BUFFER_BYTES) as file:
            file.seek(len(BOM) if file.read(len(BOM)) == BOM else 0)
            yield from ((number, line) for number, line in enumerate(file, 1) if line.strip())
    except OSError as error:
        raise BadRow(f"{shorten_path(path)}: {error.strerror or error}; name a JSONL file that can be read") from error


def parse_row(line: bytes, *, where: str) -> Row:
    """Return the JSON object in *line*.

    Args:
        line: A line of JSONL.
        where: The location of the line, for messages.

    Raises:
        BadRow: The line is not a JSON object.
    """
    try:
        row = parse_json(line, strict=True)
    except ValueError as error:
        raise BadRow(f"{where}: not valid JSON ({error}); correct or remove the line") from None
    if not isinstance(row, dict):
        kind = type(row).__name__
        raise BadRow(f"{where}: expected a JSON object, got {kind}; correct or remove the line")
    return row


def is_finite_number(value: object) -> TypeGuard[float]:
    """Return whether *value* is a number within the range of a double, and neither NaN nor infinite."""
    try:
        return isinstance(value, (int, float)) and math.isfinite(value)
    except OverflowError:
        return False


def _has_large_integer(data: bytes) -> bool:
    """Return whether *data* may hold an integer beyond 64 bits; a string with such digits counts too."""
    if len(data) > MIN_SAMPLED_BYTES:
        if b"000" not in data[::SAMPLE_STRIDE_BYTES].translate(_BYTE_SHAPES):
            return False
        data = _cut_log_probs(data)
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


def _cut_log_probs(data: bytes) -> bytes:
    """Return *data* without the contents of the first list of log-probabilities, if it is long."""
    begin = data.find(_LOG_PROBS) + len(_LOG_PROBS)
    end = data.find(b"]", begin)
    if begin < len(_LOG_PROBS) or end - begin <= MIN_SAMPLED_BYTES:
        return data
    return data[:begin] + data[end:]


def _parse_with_stdlib(data: bytes, *, strict: bool) -> Any:
    try:
        value = json.loads(
            data.decode(), parse_int=_parse_integer, parse_float=_parse_float, parse_constant=_reject_constant
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if strict and b"\\ud" in data.lower():
        # Raises a ValueError for an unpaired surrogate.
        json.dumps(value, ensure_ascii=False).encode()
    return value


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
    raise ValueError(f"{name} is not a JSON number")


def _convert_to_plain(value: Any, default: Callable[[Any], Any] | None) -> Any:
    """Convert *value* to plain types in the same way as orjson, so that the standard library can write it."""
    if isinstance(value, dict):
        return {_format_key(key): _convert_to_plain(member, default) for key, member in value.items()}
    if isinstance(value, (list, tuple)):
        return [_convert_to_plain(member, default) for member in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: _convert_to_plain(member, default) for name, member in _iter_members(value)}
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
    """Yield the public attributes of a dataclass, which orjson writes."""
    names = vars(value) if hasattr(value, "__dict__") else [field.name for field in dataclasses.fields(value)]
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
