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
    ChatML with tools in the Hermes form. Every observation but the first begins by ending the policy's last turn,
    unless the action did, also where the environment says nothing to it; and it ends with the words that begin the next
    one, unless the episode is over. Of an episode that ends without an answer the last observation is empty: it ends no
    turn that the policy did not.

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
        if action not in self.action_space:
            raise UsageError(f"an action of codec='text' is a string, not {type(action).__name__}")
        self._end = _end(action)
        return spoken(chatml.before_marks(action)).build_items(turn=turn)

    def answered(self, items: Sequence[Item], *, over: bool) -> str:
        """Give the end of the policy's turn, the new messages, and the beginning of its next one."""
        if over and not items:
            return ""
        return self._end + _written(chat.messages({"input": list(items)}), prompt=not over)


def _written(messages: list[Item], tools: Sequence[Item] = (), *, prompt: bool = True) -> str:
    return chatml.text(chatml.pieces(messages, tools=tools, add_generation_prompt=prompt))


def _end(action: str) -> str:
    """What has to follow *action* for its turn to be over."""
    _, ended, tail = action.rpartition(Mark.END)
    if not ended or tail.strip():
        return f"{Mark.END}\n"
    return "" if tail.endswith("\n") else "\n"
