"""Parse the actions of a policy, and keep the conversation that a model continues."""

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
    """The output items of a model's turn.

    A list of items, which also tells the environment what a list cannot: the token usage, whether the model ran out of
    tokens, and whether it failed. A turn with a failure ends its episode as failed.

    Attributes:
        response: The model's Response, if the turn comes from one.
        failure: Why the model gave no turn.
    """

    def __init__(self, response: Item | None = None, *, failure: EpisodeError | None = None) -> None:
        super().__init__(response["output"] if response else ())
        self.response = response
        self.failure = failure

    def deep_copy(self) -> Self:
        """Return a copy of the turn with copied items."""
        copied = type(self)(self.response, failure=self.failure)
        copied[:] = deepcopy(list(self))
        return copied


def build_response(items: list[Item]) -> Item:
    """Return the Response for the parsed *items* of an action; raises the turn's failure if there is one."""
    if not isinstance(items, Turn):
        return responses.build_response(items, model="policy")
    if items.failure:
        raise items.failure
    return (items.response or responses.build_response([], model="policy")) | {"output": list(items)}


def parse_action(action: object) -> list[Item]:
    """Parse a string, a chat message of the assistant, or a list of Responses items.

    Returns:
        The items, with the IDs that the action gives and no others.

    Raises:
        UsageError: The action has none of these forms.
    """
    if isinstance(action, str):
        return [_drop_id(responses.build_message(str(action)))]
    if isinstance(action, Mapping):
        return _parse_message(deepcopy(dict(action)))
    if isinstance(action, (list, tuple)) and all(isinstance(item, Mapping) for item in action):
        return [_check_item(deepcopy(dict(item))) for item in action]
    wrong = [item for item in action if not isinstance(item, Mapping)] if isinstance(action, (list, tuple)) else []
    found = f"a list with {wrong[0]!r} in it" if wrong else type(action).__name__
    raise UsageError(
        f"an action must be a string, a chat message of the assistant or a list of Responses items, got {found}"
    )


def _parse_message(message: Item) -> list[Item]:
    """Parse a chat message into items."""
    if message.setdefault("role", "assistant") != "assistant":
        raise UsageError(f"an action must have the role 'assistant', this message has the role {message['role']!r}")
    _check_content(message.get("content"))
    calls = message.get("tool_calls")
    if calls is not None and not is_object_list(calls):
        raise UsageError(f"the `tool_calls` of an action must be a list of tool calls, got {calls!r}")
    try:
        named = {number for number, call in enumerate(calls or []) if call.get("id")}
        items = served.parse_message(message)
    except InvalidRequest as error:
        advice = (
            "the text must be a string, and each of the `tool_calls` must have a `function` with `name` and `arguments`"
        )
        raise UsageError(f"the action cannot be read as a chat message; {advice}: {message}") from error
    for number, call in enumerate(item for item in items if item["type"] == "function_call"):
        if number not in named:
            del call["call_id"]
    return [_drop_id(_check_item(item)) for item in items]


def _check_item(item: Item) -> Item:
    """Return *item* in full form; raises `UsageError` for an item that only the environment may write."""
    if not is_policy_item(item):
        kind = item.get("role") or item.get("type")
        raise UsageError(f"an action may hold the assistant's messages, function calls and reasoning, not {kind!r}")
    if item.get("type") == "function_call":
        return _parse_call(item)
    _check_content(item.get("content"))
    return {"type": "message", **item}


def _check_content(content: object) -> None:
    if not is_content(content):
        raise UsageError(f"the content of a message must be text or a list of parts, got {type(content).__name__}")


def _parse_call(call: Item) -> Item:
    name, arguments = call.get("name"), call.get("arguments", "{}")
    if not isinstance(name, str):
        raise UsageError(f"the `name` of a function call must be the name of a tool, got {name!r}")
    try:
        return call | {"arguments": arguments if isinstance(arguments, str) else json.dumps(arguments)}
    except (TypeError, ValueError) as error:
        raise UsageError(f"the arguments of the call of {name!r} are not JSON: {error}") from None


def _drop_id(item: Item) -> Item:
    """Return *item* without its ID."""
    return {key: value for key, value in item.items() if key != "id"}


FINAL_INFO_KEYS = ("outcome", "failure")
"""The keys of an `info` after which the policy's next action is ignored: the episode is over or was never opened."""

PARSE_ERRORS = (InvalidRequest, LookupError, TypeError, AttributeError)
"""What the parsers of chat messages raise for other input."""


class Conversation:
    """The conversation of one slot: an `info` with `tools` starts a new one, an outcome or a failure ends it."""

    def __init__(self) -> None:
        self._history: list[Item] = []
        self._new: list[Item] = []
        self._tools: list[Item] | None = None
        self._over = False

    def observe(self, observation: Any, info: Mapping[str, Any]) -> bool:
        """Add an observation; return whether the policy has a turn. Raises `UsageError`."""
        if "tools" in info:
            self._history, self._tools, self._over = [], _parse_tools(info["tools"]), False
        if self._tools is None:
            raise UsageError(
                "the first observation of a policy must come with the info of reset(), which holds the tools"
            )
        self._over = self._over or any(key in info for key in FINAL_INFO_KEYS)
        self._new = [] if self._over else _parse_observation(observation)
        return not self._over

    def build_request(self) -> Item:
        """Return the request for the policy's next turn."""
        tools = {"tools": self._tools} if self._tools else {}
        return {"input": [*self._history, *self._new], **tools}

    def add_output(self, output: Sequence[Item]) -> None:
        """Add the output items of the policy's turn. After a failed turn, the same request may be sent again."""
        self._history += [*self._new, *output]
        self._new = []


def _parse_observation(observation: Any) -> list[Item]:
    is_text = isinstance(observation, str) or not isinstance(observation, Sequence)
    if is_text or not all(isinstance(message, Mapping) for message in observation):
        raise UsageError(
            f"a policy reads chat messages, this observation is {_describe_observation(observation)}; "
            "create the environment with codec='chat'"
        )
    # The conversion generates IDs, which are not part of the observation.
    return [
        {key: value for key, value in item.items() if key != "id"}
        for message in observation
        for item in _parse_chat_message(message)
    ]


def _parse_chat_message(message: Mapping[str, Any]) -> list[Item]:
    try:
        return served.parse_message(dict(message))
    except PARSE_ERRORS as error:
        advice = "a chat message needs a `role` and a `content` that is text or a list of parts"
        raise UsageError(f"the observation cannot be read; {advice}, got {message}") from error


def _parse_tools(offered: Any) -> list[Item]:
    try:
        return served.parse_tools(offered)
    except PARSE_ERRORS as error:
        message = f"info['tools'] must be a list of tools in the form of Chat Completions, got {offered!r}"
        raise UsageError(f"{message}; pass the info of reset() unchanged") from error


def _describe_observation(observation: Any) -> str:
    return "text" if isinstance(observation, str) else f"of type {type(observation).__name__}"
