"""Blocks: what Messages has for the items of Responses, there and back.

A text, a call and a result are one block each; reasoning is a thinking block for each of its texts. On the way back
the ids of replies and calls are new, a reply's parts and a refusal are one text, annotations are gone, and so are
items that neither say nor call anything. Everything else survives, token ids included, as long as a client sends
back the blocks as it got them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby

from gymsdk import wire
from gymsdk.convert.tokens import CARRIED
from gymsdk.transcript import Item, text_of

from . import inputs, shape, shown, signed
from .face import Malformed

THINKING = ("thinking", "redacted_thinking")


def blocks(output: list[Item]) -> list[Item]:
    """Give the blocks that say what the items of an *output* say; an item's tokens are on its last block."""
    said: list[Item] = []
    for item in output:
        if told := _TOLD.get(item.get("type", "message")):
            said += told(item)
            said[-1] |= {key: item[key] for key in CARRIED if key in item}
    return said


def items(message: Item, where: str) -> Iterator[Item]:
    """The items that a *message* at *where* amounts to, in the order of its blocks."""
    role, content = message.get("role"), message.get("content")
    read = _READ.get(role) if isinstance(role, str) else None
    if read is None:
        raise Malformed(f"{where}.role must be 'user', 'assistant' or 'system', not {role!r}", param=f"{where}.role")
    given = [{"type": "text", "text": content}] if isinstance(content, str) else content
    yield from read(shape.objects(given, f"{where}.content"), f"{where}.content")


def _reply(item: Item) -> list[Item]:
    content = item.get("content")
    refused = "" if isinstance(content, str) else "".join(part.get("refusal") or "" for part in content or [])
    return [{"type": "text", "text": text_of(content) + refused}]


_TOLD: dict[str, Callable[[Item], list[Item]]] = {
    "message": _reply,
    "reasoning": signed.blocks,
    "function_call": lambda item: [inputs.block(item)],
}


def _shown(blocks: list[Item], where: str) -> Iterator[Item]:
    """What a user says: results of tools are items of their own, what stands between them is one message."""
    for results, group in groupby(enumerate(blocks), lambda each: each[1].get("type") == "tool_result"):
        run = [(f"{where}.{number}", block) for number, block in group]
        if results:
            yield from (shown.result(block, place) for place, block in run)
        else:
            yield {"role": "user", "content": [part for place, block in run for part in shown.part(block, place)]}


def _told(blocks: list[Item], where: str) -> Iterator[Item]:
    """What the system says, in the middle of it all."""
    yield {"role": "system", "content": shown.parts(blocks, where)}


def _spoken(blocks: list[Item], where: str) -> Iterator[Item]:
    """What the assistant said: neighbours of one signature are one thought."""
    for _, group in groupby(enumerate(blocks), _thought):
        run = list(group)
        place, said = f"{where}.{run[0][0]}", [block for _, block in run]
        item = signed.item(said, place) if said[0].get("type") in THINKING else _item(said[0], place)
        if item is not None:
            yield item | {key: said[-1][key] for key in CARRIED if said[-1].get(key) is not None}


def _thought(numbered: tuple[int, Item]) -> object:
    """What a block shares with those that are one item with it: its signature, if not its own number."""
    number, block = numbered
    return block.get("signature") or "" if block.get("type") == "thinking" else number


def _item(block: Item, where: str) -> Item:
    kind = block.get("type")
    if kind == "text":
        return wire.message(shape.text(block, "text", where))
    if kind == "tool_use":
        return inputs.call(block, where)
    sentence = f"{where}: an assistant's block of type {kind!r} is nothing that a model behind this server has said"
    raise Malformed(f"{sentence}; leave it out, or give it as text", param=where)


_READ: dict[str, Callable[[list[Item], str], Iterator[Item]]] = {"assistant": _spoken, "system": _told, "user": _shown}
