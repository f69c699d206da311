"""Chat messages: a policy sees dicts in the shape of OpenAI's chat, and says a reply, a message or items."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

from gymsdk import wire
from gymsdk.convert import chat, served
from gymsdk.errors import UsageError
from gymsdk.gym.spaces import Messages, Turns
from gymsdk.gym.turn import Turn
from gymsdk.transcript import Item
from gymsdk.turns import of_policy


class Chat:
    """The codec of chat messages."""

    def __init__(self) -> None:
        self.observation_space = Messages()
        self.action_space = Turns()

    def opened(self, opening: Sequence[Item], tools: Sequence[Item]) -> list[Item]:  # noqa: ARG002  # `info` has the tools
        """Give the opening messages."""
        return self.answered(opening)

    def said(self, action: Any, *, turn: int) -> list[Item]:
        """Give the items of a string, an assistant's message, or a list of items."""
        if isinstance(action, Turn):
            return action.copied()
        if isinstance(action, Turn):
            return action.copied()
        return [_identified(item, turn, number) for number, item in enumerate(_items(action))]

    def answered(self, items: Sequence[Item]) -> list[Item]:
        """Give the new messages."""
        return deepcopy(chat.messages({"input": list(items)}))


def _items(action: Any) -> list[Item]:
    if isinstance(action, str):
        return [_unnamed(wire.message(str(action)))]
    if isinstance(action, Mapping):
        return _spoken(deepcopy(dict(action)))
    if isinstance(action, Sequence) and all(isinstance(item, Mapping) for item in action):
        return [_own(deepcopy(dict(item))) for item in action]
    raise UsageError(
        f"an action is a string, an assistant's chat message or a list of Responses items, not {type(action).__name__}"
    )


def _spoken(message: Item) -> list[Item]:
    """Give the items of a chat *message*."""
    if message.setdefault("role", "assistant") != "assistant":
        raise UsageError(f"an action is what the assistant says; this message has role {message['role']!r}")
    try:
        named = {number for number, call in enumerate(message.get("tool_calls") or []) if call.get("id")}
        items: list[Item] = served.request({"messages": [message]})["input"]
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise UsageError(f"the action is no chat message ({error!r}): {message}") from error
    calls = [item for item in items if item["type"] == "function_call"]
    for number, call in enumerate(calls):
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
    content = item.get("content")
    if isinstance(content, str) or content is None or _are_objects(content):
        return {"type": "message", **item}
    raise UsageError(f"the content of a message is text or a list of parts, not {type(content).__name__}")


def _called(call: Item) -> Item:
    name, arguments = call.get("name"), call.get("arguments", "{}")
    if not isinstance(name, str):
        raise UsageError(f"a function call has the `name` of a tool; this one has {name!r}")
    try:
        return call | {"arguments": arguments if isinstance(arguments, str) else json.dumps(arguments)}
    except (TypeError, ValueError) as error:
        raise UsageError(f"the arguments of the call of {name!r} are no JSON: {error}") from None


def _are_objects(content: object) -> bool:
    return isinstance(content, list) and all(isinstance(part, dict) for part in content)


def _unnamed(item: Item) -> Item:
    """Give *item* without the id it was made with."""
    return {key: value for key, value in item.items() if key != "id"}


def _identified(item: Item, turn: int, number: int) -> Item:
    """Give *item* with the ids it lacks, the same every time the turn is taken."""
    if item["type"] != "function_call":
        return {"id": f"{'rs' if item['type'] == 'reasoning' else 'msg'}_{turn}_{number}", **item}
    return {"id": f"fc_{turn}_{number}", **item, "call_id": item.get("call_id") or f"call_{turn}_{number}"}
