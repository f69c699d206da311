"""Turns: what a policy did each time it was asked, read off a transcript's items."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile

from gymsdk.transcript import Action, Item, Message, is_reply, text_of, tool_calls

NOT_RUN = '{"error":"not run: the episode is over"}'
"""What answers a call that came after the end of its episode."""


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
    whole = list(items)
    return (whole[span] for span in spans(whole))


def spans(items: Sequence[Item]) -> Iterator[slice]:
    """Yield where in *items* each turn lies."""
    start = None
    for index, item in enumerate(items):
        if of_policy(item):
            start = index if start is None else start
        elif start is not None:
            yield slice(start, index)
            start = None
    if start is not None:
        yield slice(start, len(items))


def played(items: Sequence[Item], span: slice) -> list[Action]:
    """Give the actions of one turn that were played: not a call without an answer, nor one answered `not run`."""
    after = takewhile(lambda item: not of_policy(item), items[span.stop :])
    run = [item.get("call_id") for item in after if item.get("output", NOT_RUN) != NOT_RUN]
    return [act for act in actions(items[span]) if isinstance(act, Message) or act.call_id in run]


def of_policy(item: Item) -> bool:
    """Whether the policy made *item*, not the environment."""
    # No set, here and above: a client's item may have anything for its type and its id.
    return is_reply(item) or item.get("type") in ("function_call", "reasoning")
