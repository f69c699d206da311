"""JSON read and written without loss: orjson's speed, and the standard library where orjson would change a value.

orjson reads an integer beyond 64 bits as a float, and does not write one; it neither reads nor writes half of a
surrogate pair. All JSON of the package goes through this module, so that a value is the same on every way it takes.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
from collections.abc import Callable, Iterator
from datetime import date, time
from typing import Any, TypeGuard
from uuid import UUID

import orjson

MAX_INTEGER_DIGITS = 4300
"""Digits that an integer may have: Python's own limit, as converting decimal digits takes quadratic time."""

SAMPLED_FROM = 4096
"""Bytes from which a text is sampled before it is searched."""

STRIDE = 6
"""Every so many bytes are sampled: at least three of them lie in 19 digits."""

# A number that begins a value stands behind one of these bytes. The digits of a fraction do not.
_BEFORE_A_NUMBER = b"[,: \n\r\t-"
_SHAPE = bytes(
    ord("0") if byte in b"0123456789" else ord("<") if byte in _BEFORE_A_NUMBER else ord("x") for byte in range(256)
)
_LONG = b"<" + b"0" * 19
"""What an integer beyond 64 bits looks like: positive ones have 20 digits or more, negative ones 19."""


def parsed(text: bytes | str, *, strict: bool = False) -> Any:
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
        return _parsed_slowly(data, strict=strict)
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        if strict or b"\\ud" not in data.lower():
            raise
    return _parsed_slowly(data, strict=False)


def written(
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
        plain = _plain(value, default)
    except RecursionError:
        raise ValueError("the value contains itself, or is nested too deeply") from None
    text = json.dumps(plain, allow_nan=False, ensure_ascii=not replace_surrogates, indent=2 if indent else None)
    return text.encode("utf-8", "replace")


def ordered(value: object) -> bytes:
    """Return *value* as JSON that is the same in whatever order its keys came."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except TypeError:
        return json.dumps(value, sort_keys=True).encode()


def is_finite(value: object) -> TypeGuard[float]:
    """Return whether *value* is a number that a double can hold: no NaN, no infinity, no larger integer."""
    try:
        return isinstance(value, (int, float)) and math.isfinite(value)
    except OverflowError:
        return False


def _has_large_integer(data: bytes) -> bool:
    """Whether *data* may hold an integer beyond 64 bits; a text inside it that looks like one counts too."""
    if len(data) > SAMPLED_FROM and b"000" not in data[::STRIDE].translate(_SHAPE):
        return False
    shape = data.translate(_SHAPE)
    if shape.startswith(_LONG[1:]):
        return True
    at = shape.find(_LONG)
    while at >= 0:
        # 19 digits without a sign fit into 64 bits.
        if data.startswith(b"-", at) or shape.startswith(b"0", at + len(_LONG)):
            return True
        at = shape.find(_LONG, at + 1)
    return False


def _parsed_slowly(data: bytes, *, strict: bool) -> Any:
    try:
        value = json.loads(data.decode(), parse_int=_integer, parse_float=_float, parse_constant=_constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if strict and b"\\ud" in data.lower():
        # Raises a ValueError for half of a surrogate pair.
        json.dumps(value, ensure_ascii=False).encode()
    return value


def _plain(value: Any, default: Callable[[Any], Any] | None) -> Any:
    """Return *value* as the standard library writes it: what orjson writes by itself is converted as orjson does."""
    if isinstance(value, dict):
        return {_key(key): _plain(each, default) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each, default) for each in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: _plain(each, default) for name, each in _members(value)}
    return _plain_scalar(value, default)


def _plain_scalar(value: Any, default: Callable[[Any], Any] | None) -> Any:
    if isinstance(value, enum.Enum):
        return _plain(value.value, default)
    if value is None or isinstance(value, (str, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, (date, time, UUID)):
        return orjson.loads(orjson.dumps(value))
    if default is None:
        raise TypeError(f"JSON cannot hold a value of type {type(value).__name__!r}")
    return _plain(default(value), default)


def _members(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a dataclass that orjson writes: those that are not private."""
    names = vars(value) if hasattr(value, "__dict__") else [each.name for each in dataclasses.fields(value)]
    return ((name, getattr(value, name)) for name in names if not name.startswith("_"))


def _key(key: Any) -> str:
    """Return the key of an object as orjson writes it."""
    plain = key.value if isinstance(key, enum.Enum) else key
    if isinstance(plain, str):
        return plain
    if isinstance(plain, int) and not isinstance(plain, bool):
        return str(int(plain))
    [name] = orjson.loads(orjson.dumps({plain: None}, option=orjson.OPT_NON_STR_KEYS))
    return str(name)


def _integer(digits: str) -> int:
    if len(digits) > MAX_INTEGER_DIGITS:
        raise ValueError(f"an integer has {len(digits):,} digits; at most {MAX_INTEGER_DIGITS:,} are read")
    return int(digits)


def _float(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError("a number is larger than the largest double")
    return number


def _constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")
