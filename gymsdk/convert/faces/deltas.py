"""Deltas: the events that tell an answer of Messages, as clients that fold them expect them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import MappingProxyType

from gymsdk.transcript import Item
from gymsdk.values import written

from .anthropic_errors import error
from .face import Trouble
from .sse import frame, line

BEAT = frame(b'{"type":"ping"}', "ping")
"""What clients skip."""

EMPTY: MappingProxyType[str, Item] = MappingProxyType(
    {"text": {"text": ""}, "thinking": {"thinking": "", "signature": ""}, "tool_use": {"input": {}}}
)
"""What a block begins with in place of what its deltas bring; all else that it holds is there from the beginning."""

ENDING = ("stop_reason", "stop_sequence", "stop_details")
"""What an answer says of its end, which its last events tell."""


def events(answer: Item, _: Item) -> Iterator[bytes]:
    """Give the frames that tell *answer*; each piece of it is written once."""
    for event in _all(answer):
        yield frame(line(event), event["type"])


def broken(trouble: Trouble) -> bytes:
    """Give the last frame of a stream that ends in *trouble*."""
    return frame(line(error(trouble)), "error")


def _all(answer: Item) -> Iterator[Item]:
    usage = answer["usage"]
    opened = {key: value for key, value in usage.items() if key != "output_tokens_details"} | {"output_tokens": 0}
    yield {"type": "message_start", "message": answer | _unsaid() | {"usage": opened}}
    for index, block in enumerate(answer["content"]):
        yield {"type": "content_block_start", "index": index, "content_block": block | EMPTY.get(block["type"], {})}
        for delta in _deltas(block):
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    yield {"type": "message_delta", "delta": {key: answer[key] for key in ENDING}, "usage": usage}
    yield {"type": "message_stop"}


def _unsaid() -> Item:
    return {"content": []} | dict.fromkeys(ENDING)


def _deltas(block: Item) -> list[Item]:
    return _TOLD[block["type"]](block)


def _thought(block: Item) -> list[Item]:
    return [
        {"type": "thinking_delta", "thinking": block["thinking"]},
        {"type": "signature_delta", "signature": block["signature"]},
    ]


_TOLD: MappingProxyType[str, Callable[[Item], list[Item]]] = MappingProxyType(
    {
        "text": lambda block: [{"type": "text_delta", "text": block["text"]}],
        "thinking": _thought,
        "redacted_thinking": lambda _: [],
        "tool_use": lambda block: [{"type": "input_json_delta", "partial_json": written(block["input"]).decode()}],
    }
)
