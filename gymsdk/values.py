"""Values: JSON as it comes and goes over HTTP, read and written without loss, half a surrogate pair and all."""

from __future__ import annotations

import json

import orjson


def parsed(text: bytes) -> object:
    """Give the JSON value in *text*; raises `ValueError`."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        if b"\\ud" not in text.lower():
            raise
    # Half a surrogate pair: a policy may write one, and orjson does not read it.
    return json.loads(text, parse_constant=_no_number)


def written(value: object) -> bytes:
    """Give *value* as JSON; raises `TypeError` or `ValueError` where JSON cannot hold it."""
    try:
        return orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS)
    except TypeError:
        # Half a surrogate pair, an integer beyond 64 bits: the standard library writes what orjson will not.
        return json.dumps(value, allow_nan=False).encode()


def ordered(value: object) -> bytes:
    """Give *value* as JSON that is the same in whatever order its keys came."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except TypeError:
        return json.dumps(value, sort_keys=True).encode()


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")
