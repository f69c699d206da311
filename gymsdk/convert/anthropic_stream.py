"""Stream a message as the server-sent events of Anthropic's Messages, and build its error responses."""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType

from gymsdk.convert.api import ApiError
from gymsdk.convert.sse import build_frame, dump_line
from gymsdk.jsonl import dump_json
from gymsdk.types import Item

PING_FRAME = build_frame(b'{"type":"ping"}', "ping")
"""The heartbeat, which clients ignore."""

EMPTY_BLOCKS: MappingProxyType[str, Item] = MappingProxyType(
    {"text": {"text": ""}, "thinking": {"thinking": "", "signature": ""}, "tool_use": {"input": {}}}
)
"""By type of block, the fields that are empty in its first event because deltas fill them."""

END_FIELDS = ("stop_reason", "stop_sequence", "stop_details")
"""The fields of a message that its last events have."""

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
"""The `type` of an error by HTTP status; others are `api_error` or `invalid_request_error`."""


def build_error(error: ApiError) -> Item:
    """Return the body of *error* in the format of the Anthropic API; its SDK reads the code in the details."""
    default = "api_error" if error.status >= 500 else "invalid_request_error"  # noqa: PLR2004 - HTTP server errors
    kind = ERROR_TYPES.get(error.status, default)
    details = {"details": {"error_code": error.code}} if error.code else {}
    return {"type": "error", "error": {"type": kind, "message": error.message} | details}


def build_error_frames(error: ApiError) -> bytes:
    """Return the last frame of a stream that fails."""
    return build_frame(dump_line(build_error(error)), "error")


def stream_events(answer: Item, _: Item) -> Iterator[bytes]:
    """Yield the frames of the events for *answer*."""
    for event in _build_events(answer):
        yield build_frame(dump_line(event), event["type"])


def _build_events(answer: Item) -> Iterator[Item]:
    usage = answer["usage"]
    initial_usage = {key: value for key, value in usage.items() if key != "output_tokens_details"}
    initial = {"content": [], "usage": initial_usage | {"output_tokens": 0}} | dict.fromkeys(END_FIELDS)
    yield {"type": "message_start", "message": answer | initial}
    for index, block in enumerate(answer["content"]):
        empty = EMPTY_BLOCKS.get(block["type"], {})
        yield {"type": "content_block_start", "index": index, "content_block": block | empty}
        for delta in _build_deltas(block):
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    yield {"type": "message_delta", "delta": {key: answer[key] for key in END_FIELDS}, "usage": usage}
    yield {"type": "message_stop"}


def _build_deltas(block: Item) -> list[Item]:
    match block["type"]:
        case "text":
            return [{"type": "text_delta", "text": block["text"]}]
        case "thinking":
            return [
                {"type": "thinking_delta", "thinking": block["thinking"]},
                {"type": "signature_delta", "signature": block["signature"]},
            ]
        case "tool_use":
            return [{"type": "input_json_delta", "partial_json": dump_json(block["input"]).decode()}]
        case _:
            return []
