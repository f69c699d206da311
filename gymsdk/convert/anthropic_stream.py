"""Deltas: the events that tell an answer of Messages, as clients that fold them expect them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import MappingProxyType

from gymsdk.convert.api import ApiError
from gymsdk.convert.sse import build_frame, dump_line
from gymsdk.jsonl import dump_json
from gymsdk.types import Item

ERROR_TYPES = MappingProxyType(
    {
        401: "authentication_error",
        402: "billing_error",
        403: "permission_error",
        404: "not_found_error",
        408: "timeout_error",
        409: "conflict_error",
        413: "request_too_large",
        429: "rate_limit_error",
        503: "overloaded_error",
        504: "timeout_error",
        529: "overloaded_error",
    }
)
"""The types of errors by status; any other is an `api_error` where it is the server's, else a wrong request."""


def build_error(trouble: ApiError) -> Item:
    """Give the body that tells of *trouble*; the SDK reads its code among the details."""
    otherwise = "api_error" if trouble.status >= 500 else "invalid_request_error"  # noqa: PLR2004 - where HTTP's own server errors begin
    kind = ERROR_TYPES.get(trouble.status, otherwise)
    details = {"details": {"error_code": trouble.code}} if trouble.code else {}
    return {"type": "error", "error": {"type": kind, "message": trouble.message} | details}


PING_FRAME = build_frame(b'{"type":"ping"}', "ping")
"""What clients skip."""

EMPTY_BLOCKS: MappingProxyType[str, Item] = MappingProxyType(
    {"text": {"text": ""}, "thinking": {"thinking": "", "signature": ""}, "tool_use": {"input": {}}}
)
"""What a block begins with in place of what its deltas bring; all else that it holds is there from the beginning."""

END_FIELDS = ("stop_reason", "stop_sequence", "stop_details")
"""What an answer says of its end, which its last events tell."""


def stream_events(answer: Item, _: Item) -> Iterator[bytes]:
    """Give the frames that tell *answer*; each piece of it is written once."""
    for event in _all(answer):
        yield build_frame(dump_line(event), event["type"])


def build_error_frames(trouble: ApiError) -> bytes:
    """Give the last frame of a stream that ends in *trouble*."""
    return build_frame(dump_line(build_error(trouble)), "error")


def _all(answer: Item) -> Iterator[Item]:
    usage = answer["usage"]
    opened = {key: value for key, value in usage.items() if key != "output_tokens_details"} | {"output_tokens": 0}
    yield {"type": "message_start", "message": answer | _unsaid() | {"usage": opened}}
    for index, block in enumerate(answer["content"]):
        yield {
            "type": "content_block_start",
            "index": index,
            "content_block": block | EMPTY_BLOCKS.get(block["type"], {}),
        }
        for delta in _deltas(block):
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    yield {"type": "message_delta", "delta": {key: answer[key] for key in END_FIELDS}, "usage": usage}
    yield {"type": "message_stop"}


def _unsaid() -> Item:
    return {"content": []} | dict.fromkeys(END_FIELDS)


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
        "tool_use": lambda block: [{"type": "input_json_delta", "partial_json": dump_json(block["input"]).decode()}],
    }
)
