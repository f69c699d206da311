"""Read the arguments of tool calls, and mend those that are not a JSON object before a server reads them.

A policy may write any text as the arguments of a call. The environment answers such a call with an error, and the
conversation goes on. Inference servers, however, parse the arguments in the history and reject a conversation in which
one of them is not a JSON object, and Messages has no place for such a text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import orjson

from gymsdk.jsonl import measure_depth
from gymsdk.types import Item

UNPARSED_ARGUMENTS_KEY = "_arguments"
"""The only key of the arguments that replace a text that is no JSON object; its value is that text."""


MAX_DEPTH = 500
"""The levels of nesting that every client and server can read; Python's parser stops at about 1,000 in 3.11 only."""


def parse_arguments(arguments: str, parse_int: Callable[[str], float] = int) -> Item | None:
    """Return *arguments* as an object, `None` if they are no object that every client and server can read."""
    try:
        value = json.loads(arguments or "{}", parse_int=parse_int)
        # Not everyone can read a lone surrogate, or a number beyond the range of floats.
        dump_arguments(value).encode()
    except (ValueError, OverflowError, RecursionError):
        return None
    return value if isinstance(value, dict) and measure_depth(value) <= MAX_DEPTH else None


def is_object(arguments: str) -> bool:
    """Whether *arguments* are an object that every client and server can read."""
    # Each request checks the whole conversation. Apart from deep nesting, orjson reads nothing that the others refuse.
    if arguments.count("[") + arguments.count("{") <= MAX_DEPTH:
        try:
            return isinstance(orjson.loads(arguments), dict)
        except orjson.JSONDecodeError:
            pass  # perhaps only a long integer
    return parse_arguments(arguments) is not None


def dump_arguments(value: Item) -> str:
    """Return *value* as JSON. Raises `ValueError` if it has a number that JSON does not support."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def repair_messages(messages: Sequence[Item]) -> list[Item]:
    """Return chat *messages* in which the arguments of all tool calls are JSON objects."""
    return [_mend_message(message) if message.get("tool_calls") else message for message in messages]


def repair_items(items: Sequence[Item]) -> list[Item]:
    """Return the *items* of a conversation in which the arguments of all function calls are JSON objects."""
    return [_mend_function(item) if item.get("type") == "function_call" else item for item in items]


def _mend_message(message: Item) -> Item:
    return message | {
        "tool_calls": [call | {"function": _mend_function(call["function"])} for call in message["tool_calls"]]
    }


def _mend_function(function: Item) -> Item:
    """Return a *function* with a name and arguments, the latter as the text of an object."""
    arguments = function.get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {})
    if not text:
        return function | {"arguments": "{}"}
    if is_object(text):
        return function if text is arguments else function | {"arguments": text}
    # A lone surrogate is a question mark for servers.
    readable = text.encode(errors="replace").decode()
    return function | {"arguments": dump_arguments({UNPARSED_ARGUMENTS_KEY: readable})}
