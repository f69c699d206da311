"""Turns: what a policy did each time it was asked, read off a transcript's items."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from gymsdk.types import Action, Item, Message, is_reply, text_of, tool_calls


def actions(output: Iterable[Item]) -> list[Action]:
    """Give what one turn does: its tool calls in order, or else its text as one reply; nothing if it has neither."""
    items = list(output)
    calls: list[Action] = list(tool_calls(items))
    if calls:
        return calls
    text = "".join(text_of(item.get("content")) for item in items if is_reply(item))
    return [Message(role="assistant", content=text)] if text else []


def turns(items: Iterable[Item]) -> Iterator[list[Item]]:
    """Yield the policy's items turn by turn: an item of the environment ends a turn."""
    turn: list[Item] = []
    for item in items:
        if of_policy(item):
            turn.append(item)
        elif turn:
            yield turn
            turn = []
    if turn:
        yield turn


def of_policy(item: Item) -> bool:
    """Whether the policy made *item*, not the environment."""
    return is_reply(item) or item.get("type") in {"function_call", "reasoning"}
