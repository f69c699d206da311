"""A conversation: what a policy has seen and said in the episode in hand, as a model is asked to go on with it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any, Self

from gymsdk import responses
from gymsdk.convert import chat_inbound as served
from gymsdk.convert.api import InvalidRequest
from gymsdk.errors import EpisodeError, UsageError
from gymsdk.responses import is_policy_item
from gymsdk.types import Item, is_content, is_object_list


class Turn(list[Item]):
    """The output items of a model's *response*, or none of them and the *failure* that says why.

    To everybody else a list of items, it tells the environment what a list cannot: that the model ran out of tokens,
    what it used, that it broke. A turn with a failure ends its episode as failed.
    """

    def __init__(self, response: Item | None = None, *, failure: EpisodeError | None = None) -> None:
        super().__init__(response["output"] if response else ())
        self.response = response
        self.failure = failure

    def copied(self) -> Self:
        """Give the same turn, its items nobody else's."""
        copied = type(self)(self.response, failure=self.failure)
        copied[:] = deepcopy(list(self))
        return copied


def response(items: list[Item]) -> Item:
    """Give the Response that an action's *items* came in; raises `EpisodeError` where its model broke."""
    if not isinstance(items, Turn):
        return responses.build_response(items, model="policy")
    if items.failure:
        raise items.failure
    return (items.response or responses.build_response([], model="policy")) | {"output": list(items)}


def spoken(action: object) -> list[Item]:
    """Give the items of a string, of an assistant's message or of a list of items; raises `UsageError` for no action.

    They have the ids they were given, and no others.
    """
    if isinstance(action, str):
        return [_unnamed(responses.build_message(str(action)))]
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
    if calls is not None and not is_object_list(calls):
        raise UsageError(f"the `tool_calls` of the action are a list of calls, not {calls!r}")
    try:
        named = {number for number, call in enumerate(calls or []) if call.get("id")}
        items = served.parse_message(message)
    except InvalidRequest as error:
        advice = "text is a string, and each of its `tool_calls` has a `function` with a `name` and `arguments`"
        raise UsageError(f"the action is no chat message that can be read; {advice}: {message}") from error
    for number, call in enumerate(item for item in items if item["type"] == "function_call"):
        if number not in named:
            del call["call_id"]
    return [_unnamed(_own(item)) for item in items]


def _own(item: Item) -> Item:
    """Give an *item* of the policy's, refuse any other: what the environment says is not for a policy to write."""
    if not is_policy_item(item):
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


OVER = ("outcome", "failure")
"""What an `info` has where the policy's next action counts for nothing: the episode has ended, or never opened."""

UNREADABLE = (InvalidRequest, LookupError, TypeError, AttributeError)
"""What comes of reading messages that are none."""


class Conversation:
    """One seat's: an `info` with `tools` opens it anew, one with an outcome or a failure ends it."""

    def __init__(self) -> None:
        self._history: list[Item] = []
        self._new: list[Item] = []
        self._tools: list[Item] | None = None
        self._over = False

    def hear(self, observation: Any, info: Mapping[str, Any]) -> bool:
        """Take what the environment shows and give whether the policy has a turn; raises `UsageError`."""
        if "tools" in info:
            self._history, self._tools, self._over = [], _tools(info["tools"]), False
        if self._tools is None:
            raise UsageError("a policy begins with the observation and the info of reset(), which has the tools")
        self._over = self._over or any(key in info for key in OVER)
        self._new = [] if self._over else _items(observation)
        return not self._over

    def request(self) -> Item:
        """Give the request for the policy's turn."""
        tools = {"tools": self._tools} if self._tools else {}
        return {"input": [*self._history, *self._new], **tools}

    def said(self, output: Sequence[Item]) -> None:
        """Go on with what the policy said; a turn that failed may be asked for again."""
        self._history += [*self._new, *output]
        self._new = []


def _items(observation: Any) -> list[Item]:
    is_text = isinstance(observation, str) or not isinstance(observation, Sequence)
    if is_text or not all(isinstance(message, Mapping) for message in observation):
        raise UsageError(
            f"a policy reads chat messages, and this observation is {_named(observation)}; "
            "make the environment with codec='chat'"
        )
    # The ids are not the environment's: they were made up in the translation.
    return [
        {key: value for key, value in item.items() if key != "id"} for message in observation for item in _read(message)
    ]


def _read(message: Mapping[str, Any]) -> list[Item]:
    try:
        return served.parse_message(dict(message))
    except UNREADABLE as error:
        advice = "a chat message has a `role`, and a `content` that is text or a list of parts"
        raise UsageError(f"the observation cannot be read; {advice}, unlike {message}") from error


def _tools(offered: Any) -> list[Item]:
    try:
        return served.parse_tools(offered)
    except UNREADABLE as error:
        message = f"info['tools'] is a list of tools as in Chat Completions, not {offered!r}"
        raise UsageError(f"{message}; pass the info of reset() as it is") from error


def _named(observation: Any) -> str:
    return "text" if isinstance(observation, str) else f"of type {type(observation).__name__}"
