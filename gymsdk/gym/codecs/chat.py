"""Chat messages: a policy sees dicts in the shape of OpenAI's chat, and says a reply, a message or items."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

from gymsdk.convert import chat
from gymsdk.gym.spaces import Messages, Turns
from gymsdk.gym.speech import spoken
from gymsdk.gym.turn import Turn
from gymsdk.transcript import Item


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
        return [_identified(item, turn, number) for number, item in enumerate(spoken(action))]

    def answered(self, items: Sequence[Item], *, over: bool = False) -> list[Item]:  # noqa: ARG002  # a list just ends
        """Give the new messages."""
        return deepcopy(chat.messages({"input": list(items)}))


def _identified(item: Item, turn: int, number: int) -> Item:
    """Give *item* with the ids it lacks, the same every time the turn is taken."""
    if item["type"] != "function_call":
        return {"id": f"{'rs' if item['type'] == 'reasoning' else 'msg'}_{turn}_{number}", **item}
    return {"id": f"fc_{turn}_{number}", **item, "call_id": item.get("call_id") or f"call_{turn}_{number}"}
