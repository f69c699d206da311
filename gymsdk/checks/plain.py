"""Plain values: whatever an author keeps, as JSON that can be compared, and where two of them differ."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from enum import Enum
from typing import TypeAlias

from pydantic import BaseModel
from pydantic_core import to_jsonable_python

Plain: TypeAlias = "bool | int | float | str | Sequence[Plain] | Mapping[str, Plain] | None"
"""What JSON holds."""

SHORT = 120
"""Characters of a value that a sentence quotes."""

DEEP = 60
"""Levels of a value that are looked at."""

DIGITS = 4_000
"""Bits of a number that is written out; Python refuses to write very long ones."""

ABSENT = "<not there>"


def plain(value: object, above: tuple[int, ...] = ()) -> Plain:
    """Give *value* as plain JSON; of what JSON cannot hold, only the type. It never raises."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Enum):
        return plain(value.value, above)
    if isinstance(value, (str, int, float)):
        return _scalar(value)
    if id(value) in above or len(above) > DEEP:
        return _type(value)
    return _held(value, (*above, id(value)))


def _scalar(value: str | float) -> Plain:
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, float):
        # What is no number must equal itself.
        return float(value) if math.isfinite(value) else float.__repr__(value)
    return int(value) if value.bit_length() < DIGITS else hex(value)


def _held(value: object, above: tuple[int, ...]) -> Plain:
    if isinstance(value, BaseModel):
        return plain(_fields(value), above)
    if isinstance(value, Mapping):
        return {_key(key): plain(each, above) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each, above) for each in value]
    if isinstance(value, AbstractSet):
        # Its order is no part of a set.
        return sorted((plain(each, above) for each in value), key=repr)
    if isinstance(value, (bytes, bytearray)):
        return bytes(value).hex()
    return _leaf(value)


def _fields(model: BaseModel) -> dict[str, object]:
    try:
        return model.model_dump(mode="python", warnings=False)
    except Exception:  # noqa: BLE001  # an author's serializer may raise anything; the fields are there all the same
        return dict(model)


def _leaf(value: object) -> Plain:
    """Give a date, a path, a decimal and their like as pydantic writes them."""
    try:
        written = to_jsonable_python(value)
    except Exception:  # noqa: BLE001  # whatever an author's object raises, it is none that JSON holds
        return _type(value)
    return plain(written, (id(value),))


def _key(key: object) -> str:
    found = plain(key)
    if isinstance(found, list):
        return ",".join(map(str, found))
    return str(found).lower() if isinstance(found, bool) else str(found)


def _type(value: object) -> str:
    return f"<{type(value).__name__}>"


def difference(one: Plain, other: Plain, where: str = "") -> str | None:
    """Give where *other* first differs from *one* and how, `None` where they are equal: 1 is neither 1.0 nor true."""
    if isinstance(one, dict) and isinstance(other, dict):
        keys = [*one, *(other.keys() - one.keys())]
        return _first(((key, one.get(key, ABSENT), other.get(key, ABSENT)) for key in keys), where)
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return _first(((str(n), a, b) for n, (a, b) in enumerate(zip(one, other, strict=True))), where)
    if type(one) is type(other) and one == other:
        return None
    return f"{where or 'it'} was {_short(one)}, then {_short(other)}"


def _first(pairs: Iterable[tuple[str, Plain, Plain]], where: str) -> str | None:
    found = (difference(one, other, f"{where}.{key}" if where else key) for key, one, other in pairs)
    return next((each for each in found if each), None)


def _short(value: Plain) -> str:
    text = "not there" if value is ABSENT else repr(value)
    return text if len(text) <= SHORT else f"{text[:SHORT]}…"
