"""Stream a Response as the server-sent events of the Responses API.

The events contain the output several times. Large values are encoded as JSON once and spliced into each event.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import TypeAlias

from gymsdk import responses
from gymsdk.convert.api import ApiError, build_error
from gymsdk.convert.sse import build_frame, dump_line, join_json_list, splice_json
from gymsdk.convert.tokens import CARRIED_FIELDS
from gymsdk.types import Item

EncodedFields: TypeAlias = dict[str, bytes]
"""Fields of an event whose values are already JSON."""

EventStream: TypeAlias = Iterator[tuple[Item, EncodedFields]]

PART_EVENTS = {
    "output_text": ("content", "content_part", "output_text", "text"),
    "refusal": ("content", "content_part", "refusal", "refusal"),
    "reasoning_text": ("content", "content_part", "reasoning_text", "text"),
    "summary_text": ("summary", "reasoning_summary_part", "reasoning_summary_text", "text"),
}
"""By type of part: the list that holds it, the name of its events, the name of its text's events, its text field."""

CALL_EVENTS = {
    "function_call": ("arguments", "function_call_arguments"),
    "custom_tool_call": ("input", "custom_tool_call_input"),
}
"""By type of call: the field of its arguments, and the name of their events."""

EMPTY_FIELDS: Item = {"content": [], "summary": [], "arguments": "", "input": ""}
INITIAL_FIELDS = frozenset({"call_id", "id", "name", "namespace", "phase", "role", "type"})
"""The fields of an item that its first event has."""


def stream_events(answer: Item, _: Item) -> Iterator[bytes]:
    """Yield the frames of the events for *answer*."""
    yield from _number_events(_build_events(answer))


def build_error_frames(error: ApiError) -> bytes:
    """Return the frames of a stream that fails: a failed Response, and the error event that the SDK raises."""
    body = build_error(error)["error"]
    fields = {"code": error.code or body["type"], "message": error.message}
    failed = responses.build_response([], model="", status="failed") | {"error": fields}
    events: list[Item] = [
        {"type": "response.created", "response": failed | {"status": "in_progress", "error": None}},
        {"type": "response.failed", "response": failed},
        {"type": "error", **fields, "param": error.param, "error": body},
    ]
    return b"".join(_number_events((event, {}) for event in events))


def _number_events(events: EventStream) -> Iterator[bytes]:
    for number, (event, encoded) in enumerate(events):
        yield build_frame(splice_json(event | {"sequence_number": number}, encoded), event["type"])


def _build_events(answer: Item) -> EventStream:
    started = dump_line(answer | {"status": "in_progress", "output": [], "usage": None, "incomplete_details": None})
    yield {"type": "response.created"}, {"response": started}
    yield {"type": "response.in_progress"}, {"response": started}
    items: list[bytes] = []
    for index, item in enumerate(answer["output"]):
        items.append((yield from _build_item_events(item, index)))
    status = answer["status"] if answer["status"] in {"incomplete", "failed"} else "completed"
    yield {"type": f"response.{status}"}, {"response": splice_json(answer, {"output": join_json_list(items)})}


def _build_item_events(item: Item, index: int) -> Generator[tuple[Item, EncodedFields], None, bytes]:
    """Yield the events of *item*; return the item as JSON."""
    yield {"type": "response.output_item.added", "output_index": index, "item": _build_initial_item(item)}, {}
    position = {"item_id": item["id"], "output_index": index}
    if item["type"] in CALL_EVENTS:
        yield from _build_call_events(item, position)
    encoded: EncodedFields = {}
    for key in ("summary", "content"):
        if isinstance(item.get(key), list):
            parts: list[bytes] = []
            for number, part in enumerate(item[key]):
                parts.append((yield from _build_part_events(part, number, position)))
            encoded[key] = join_json_list(parts)
    whole = splice_json(item, encoded)
    yield {"type": "response.output_item.done", "output_index": index}, {"item": whole}
    return whole


def _build_initial_item(item: Item) -> Item:
    """Return *item* as its first event has it. Items of unknown types are complete, except for token fields."""
    if item["type"] not in {"message", "reasoning", *CALL_EVENTS}:
        return {key: value for key, value in item.items() if key not in CARRIED_FIELDS}
    status = {"status": "in_progress"} if item.get("status") else {}
    empty = {key: value for key, value in EMPTY_FIELDS.items() if item.get(key) is not None}
    return {key: item[key] for key in item if key in INITIAL_FIELDS} | empty | status


def _build_call_events(item: Item, position: Item) -> EventStream:
    key, name = CALL_EVENTS[item["type"]]
    arguments = item.get(key) or ""
    if arguments:
        yield {"type": f"response.{name}.delta", **position, "delta": arguments}, {}
    yield {"type": f"response.{name}.done", **position, "name": item.get("name"), key: arguments}, {}


def _build_part_events(part: Item, number: int, position: Item) -> Generator[tuple[Item, EncodedFields], None, bytes]:
    """Yield the events of *part*; return the part as JSON."""
    list_key, part_name, text_name, text_key = PART_EVENTS.get(
        part.get("type", ""), ("content", "content_part", "", "")
    )
    position = position | {f"{list_key}_index": number}
    logprobs = {"logprobs": dump_line(part["logprobs"])} if part.get("logprobs") else {}
    whole = splice_json(part, logprobs)
    yield {"type": f"response.{part_name}.added", **position, "part": _build_empty_part(part, text_key)}, {}
    if text_name:
        yield from _build_text_events(part, position, text_name, text_key, logprobs)
    yield {"type": f"response.{part_name}.done", **position}, {"part": whole}
    return whole


def _build_empty_part(part: Item, text_key: str) -> Item:
    """Return *part* without its text; parts without a text field are complete."""
    annotations: Item = {"annotations": []} if "annotations" in part else {}
    return {"type": part["type"], text_key: "", **annotations} if text_key else part


def _build_text_events(
    part: Item, position: Item, text_name: str, text_key: str, logprobs: EncodedFields
) -> EventStream:
    text = part.get(text_key) or ""
    # OpenAI's types require the list, even if it is empty.
    encoded = {"logprobs": b"[]", **logprobs} if text_name == "output_text" else {}
    if text:
        yield {"type": f"response.{text_name}.delta", **position, "delta": text}, encoded
    for index, annotation in enumerate(part.get("annotations") or []):
        fields = {"annotation_index": index, "annotation": annotation}
        yield {"type": f"response.{text_name}.annotation.added", **position, **fields}, {}
    yield {"type": f"response.{text_name}.done", **position, text_key: text}, encoded
