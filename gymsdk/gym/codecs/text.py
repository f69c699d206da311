"""Text: a policy sees and says plain strings, which together are the whole conversation in ChatML."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gymsdk.convert import chat
from gymsdk.errors import UsageError
from gymsdk.gym.spaces import Prose
from gymsdk.tokens import chatml
from gymsdk.tokens.chatml import Mark
from gymsdk.tokens.spoken import spoken
from gymsdk.transcript import Item


class Text:
    """The codec of text.

    Observation, action, observation, action and so on, joined without anything between them, are the conversation in
    ChatML with tools in the Hermes form. Every observation ends with the words that begin the policy's turn, and every
    one but the first begins by ending its last turn, unless the action did. Nothing to see is an empty string: an
    episode that ends without an answer leaves its last turn open.

    A mark of ChatML in what is said to the policy has a space after its `<`, so that no task and no tool can forge a
    turn. What a policy says ends at its first mark, as its sampling would; the rest of the action is in the
    conversation, but not in the episode.
    """

    def __init__(self) -> None:
        self.observation_space = Prose()
        self.action_space = Prose()
        self._end = ""

    def opened(self, opening: Sequence[Item], tools: Sequence[Item]) -> str:
        """Give the opening messages, the tools offered in the system's, and the beginning of the policy's turn."""
        body = chat.body({"input": list(opening), "tools": list(tools)})
        self._end = ""
        return _written(body["messages"], body.get("tools", []))

    def said(self, action: Any, *, turn: int) -> list[Item]:
        """Give the items of a string: thoughts, text, calls."""
        if not isinstance(action, str):
            raise UsageError(f"an action of codec='text' is a string, not {type(action).__name__}")
        self._end = _end(action)
        return spoken(_before_marks(action)).items(turn=turn)

    def answered(self, items: Sequence[Item]) -> str:
        """Give the end of the policy's turn, the new messages, and the beginning of its next one."""
        if not items:
            return ""
        return self._end + _written(chat.messages({"input": list(items)}))


def _written(messages: list[Item], tools: Sequence[Item] = ()) -> str:
    return chatml.text(chatml.pieces(messages, tools=tools, add_generation_prompt=True))


def _before_marks(action: str) -> str:
    for mark in Mark:
        action = action.partition(mark)[0]
    return action


def _end(action: str) -> str:
    """What has to follow *action* for its turn to be over."""
    _, ended, tail = action.rpartition(Mark.END)
    if not ended or tail.strip():
        return f"{Mark.END}\n"
    return "" if tail.endswith("\n") else "\n"
