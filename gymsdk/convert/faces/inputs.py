"""Inputs: the arguments of a call, text that a model wrote, as the object that a `tool_use` block has for them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from gymsdk import wire
from gymsdk.transcript import Item

from . import shape

UNREADABLE = "_arguments"
"""The one key of the input of a call whose arguments are no JSON object: they are its value, verbatim."""

VERBATIM = "arguments"
"""The key of ours beside an input that, written as JSON, would not be the text that the model wrote."""

# Clients whose numbers are all floats change one that is as long.
_LONG = re.compile(r"\d{16}")


def block(call: Item) -> Item:
    """Give a function *call* as a block."""
    told: Item = {"type": "tool_use", "id": call["call_id"], "name": call["name"]}
    arguments = call["arguments"]
    read = _read(arguments)
    if read is None or read.keys() == {UNREADABLE}:
        return told | {"input": {UNREADABLE: arguments}}
    same = _written(read) == arguments and not _LONG.search(arguments)
    return told | {"input": read} | ({} if same else {VERBATIM: arguments})


def call(block: Item, where: str) -> Item:
    """Give a `tool_use` *block* as a function call, its arguments as the model wrote them where the block tells."""
    arguments = _arguments(shape.object_(block, "input", where), block.get(VERBATIM))
    return wire.function_call(shape.text(block, "name", where), arguments, shape.text(block, "id", where))


def _arguments(given: Item, verbatim: object) -> str:
    unreadable = given.get(UNREADABLE)
    if len(given) == 1 and isinstance(unreadable, str):
        return unreadable
    # A client may have changed the input since.
    if isinstance(verbatim, str) and given in (_read(verbatim), _read(verbatim, float)):
        return verbatim
    return json.dumps(given, ensure_ascii=False)


def _read(arguments: str, whole: Callable[[str], float] = int) -> Item | None:
    """The object that *arguments* are, empty where they are, `None` where they are none that every client reads."""
    try:
        value = json.loads(arguments or "{}", parse_int=whole)
        # Half a surrogate pair is what the SDK cannot read in a stream.
        _written(value).encode()
    except (ValueError, OverflowError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _written(value: Item) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
