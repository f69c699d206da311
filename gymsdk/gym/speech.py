"""Speech: what a policy of chat may say, read as items; there is one reading, for the space and for the codec."""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy

from gymsdk import wire
from gymsdk.convert.faces import chat as served
from gymsdk.convert.faces.face import Malformed
from gymsdk.errors import UsageError
from gymsdk.transcript import Item, are_objects, is_content
from gymsdk.turns import of_policy


def spoken(action: object) -> list[Item]:
    """Give the items of a string, of an assistant's message or of a list of items; raises `UsageError` for no action.

    They have the ids they were given, and no others.
    """
    if isinstance(action, str):
        return [_unnamed(wire.message(str(action)))]
    if isinstance(action, Mapping):
        return _of_message(deepcopy(dict(action)))
    if isinstance(action, (list, tuple)) and all(isinstance(item, Mapping) for item in action):
        return [_own(deepcopy(dict(item))) for item in action]
    wrong = [item for item in action if not isinstance(item, Mapping)] if isinstance(action, (list, tuple)) else []
    found = f"a list with {wrong[0]!r} in it" if wrong else type(action).__name__
    raise UsageError(f"an action is a string, an assistant's chat message or a list of Responses items, not {found}")


def _of_message(message: Item) -> list[Item]:
    """Give the items of a chat *message*."""
    if message.setdefault("role", "assistant") != "assistant":
        raise UsageError(f"an action is what the assistant says; this message has role {message['role']!r}")
    _check(message.get("content"))
    calls = message.get("tool_calls")
    if calls is not None and not are_objects(calls):
        raise UsageError(f"the `tool_calls` of the action are a list of calls, not {calls!r}")
    try:
        named = {number for number, call in enumerate(calls or []) if call.get("id")}
        items = served.items(message)
    except Malformed as error:
        advice = "text is a string, and each of its `tool_calls` has a `function` with a `name` and `arguments`"
        raise UsageError(f"the action is no chat message that can be read; {advice}: {message}") from error
    for number, call in enumerate(item for item in items if item["type"] == "function_call"):
        if number not in named:
            del call["call_id"]
    return [_unnamed(_own(item)) for item in items]


def _own(item: Item) -> Item:
    """Give an *item* of the policy's, refuse any other: what the environment says is not for a policy to write."""
    if not of_policy(item):
        kind = item.get("role") or item.get("type")
        raise UsageError(f"an action holds the assistant's messages, function calls and reasoning, not {kind!r}")
    if item.get("type") == "function_call":
        return _called(item)
    _check(item.get("content"))
    return {"type": "message", **item}


def _check(content: object) -> None:
    if not is_content(content):
        raise UsageError(f"the content of a message is text or a list of parts, not {type(content).__name__}")


def _called(call: Item) -> Item:
    name, arguments = call.get("name"), call.get("arguments", "{}")
    if not isinstance(name, str):
        raise UsageError(f"a function call has the `name` of a tool; this one has {name!r}")
    try:
        return call | {"arguments": arguments if isinstance(arguments, str) else json.dumps(arguments)}
    except (TypeError, ValueError) as error:
        raise UsageError(f"the arguments of the call of {name!r} are no JSON: {error}") from None


def _unnamed(item: Item) -> Item:
    """Give *item* without the id it was made with."""
    return {key: value for key, value in item.items() if key != "id"}
