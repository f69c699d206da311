"""A conversation: what a policy has seen and said in the episode in hand, as a model is asked to go on with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gymsdk.convert.faces import chat as served
from gymsdk.convert.faces.face import Malformed
from gymsdk.errors import UsageError
from gymsdk.transcript import Item

OVER = ("outcome", "failure")
"""What an `info` has where the policy's next action counts for nothing: the episode has ended, or never opened."""

UNREADABLE = (Malformed, LookupError, TypeError, AttributeError)
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
        return served.items(dict(message))
    except UNREADABLE as error:
        advice = "a chat message has a `role`, and a `content` that is text or a list of parts"
        raise UsageError(f"the observation cannot be read; {advice}, unlike {message}") from error


def _tools(offered: Any) -> list[Item]:
    try:
        return served.tools(offered)
    except UNREADABLE as error:
        message = f"info['tools'] is a list of tools as in Chat Completions, not {offered!r}"
        raise UsageError(f"{message}; pass the info of reset() as it is") from error


def _named(observation: Any) -> str:
    return "text" if isinstance(observation, str) else f"of type {type(observation).__name__}"
