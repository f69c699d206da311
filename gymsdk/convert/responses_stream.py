"""What happens while a Response is told: the events of its stream, as clients that fold them expect them."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import TypeAlias

from gymsdk import responses
from gymsdk.convert.api import ApiError, build_error
from gymsdk.convert.sse import build_frame, dump_line, join_json_list, splice_json
from gymsdk.convert.tokens import CARRIED_FIELDS
from gymsdk.types import Item

JsonPieces: TypeAlias = dict[str, bytes]
EventStream: TypeAlias = Iterator[tuple[Item, JsonPieces]]
"""Events, each with those of its values that are JSON already."""

PART_EVENTS = {
    "output_text": ("content", "content_part", "output_text", "text"),
    "refusal": ("content", "content_part", "refusal", "refusal"),
    "reasoning_text": ("content", "content_part", "reasoning_text", "text"),
    "summary_text": ("summary", "reasoning_summary_part", "reasoning_summary_text", "text"),
}
"""By type of part: where its index counts, the events around it, the events of its text, and where that is."""

CALL_EVENTS = {
    "function_call": ("arguments", "function_call_arguments"),
    "custom_tool_call": ("input", "custom_tool_call_input"),
}
EMPTY_FIELDS: Item = {"content": [], "summary": [], "arguments": "", "input": ""}
INITIAL_FIELDS = frozenset({"call_id", "id", "name", "namespace", "phase", "role", "type"})


def stream_events(answer: Item, _: Item) -> Iterator[bytes]:
    """Give the frames that tell *answer*; what is large in an item is written once."""
    yield from _numbered(_all(answer))


def build_error_frames(trouble: ApiError) -> bytes:
    """Give the frames of a stream that ends in *trouble*: a failed Response, and the error that the SDK raises."""
    said = build_error(trouble)["error"]
    code = trouble.code or said["type"]
    failure = {"code": code, "message": trouble.message}
    response = responses.build_response([], model="", status="failed") | {"error": failure}
    opened = response | {"status": "in_progress", "error": None}
    happened: list[Item] = [
        {"type": "response.created", "response": opened},
        {"type": "response.failed", "response": response},
        {"type": "error", **failure, "param": trouble.param, "error": said},
    ]
    return b"".join(_numbered((event, {}) for event in happened))


def _numbered(told: EventStream) -> Iterator[bytes]:
    for number, (event, pieces) in enumerate(told):
        yield build_frame(splice_json(event | {"sequence_number": number}, pieces), event["type"])


def _all(answer: Item) -> EventStream:
    opened = dump_line(answer | {"status": "in_progress", "output": [], "usage": None, "incomplete_details": None})
    yield {"type": "response.created"}, {"response": opened}
    yield {"type": "response.in_progress"}, {"response": opened}
    items: list[bytes] = []
    for place, item in enumerate(answer["output"]):
        items.append((yield from _item(item, place)))
    ending = answer["status"] if answer["status"] in {"incomplete", "failed"} else "completed"
    yield {"type": f"response.{ending}"}, {"response": splice_json(answer, {"output": join_json_list(items)})}


def _item(item: Item, place: int) -> Generator[tuple[Item, JsonPieces], None, bytes]:
    """Tell *item* and give it as JSON."""
    yield {"type": "response.output_item.added", "output_index": place, "item": _begun(item)}, {}
    at = {"item_id": item["id"], "output_index": place}
    if item["type"] in CALL_EVENTS:
        yield from _call(item, at)
    pieces: JsonPieces = {}
    for key in ("summary", "content"):
        if isinstance(item.get(key), list):
            pieces[key] = yield from _parts(item[key], at)
    whole = splice_json(item, pieces)
    yield {"type": "response.output_item.done", "output_index": place}, {"item": whole}
    return whole


def _begun(item: Item) -> Item:
    """What is known of *item* before it is told: a type nobody here knows is told at once, tokens apart."""
    if item["type"] not in {"message", "reasoning", *CALL_EVENTS}:
        return {key: value for key, value in item.items() if key not in CARRIED_FIELDS}
    status = {"status": "in_progress"} if item.get("status") else {}
    empty = {key: EMPTY_FIELDS[key] for key in EMPTY_FIELDS if item.get(key) is not None}
    return {key: item[key] for key in item if key in INITIAL_FIELDS} | empty | status


def _call(item: Item, at: Item) -> EventStream:
    key, stem = CALL_EVENTS[item["type"]]
    said = item.get(key) or ""
    if said:
        yield {"type": f"response.{stem}.delta", **at, "delta": said}, {}
    yield {"type": f"response.{stem}.done", **at, "name": item.get("name"), key: said}, {}


def _parts(parts: list[Item], at: Item) -> Generator[tuple[Item, JsonPieces], None, bytes]:
    """Tell *parts* and give them as a JSON list."""
    told: list[bytes] = []
    for place, part in enumerate(parts):
        told.append((yield from _part(part, place, at)))
    return join_json_list(told)


def _part(part: Item, place: int, at: Item) -> Generator[tuple[Item, JsonPieces], None, bytes]:
    index, around, stem, key = PART_EVENTS.get(part.get("type", ""), ("content", "content_part", "", ""))
    at = at | {f"{index}_index": place}
    heavy = {"logprobs": dump_line(part["logprobs"])} if part.get("logprobs") else {}
    whole = splice_json(part, heavy)
    yield {"type": f"response.{around}.added", **at, "part": _blank(part, key)}, {}
    if stem:
        yield from _text(part, at, stem, key, heavy)
    yield {"type": f"response.{around}.done", **at}, {"part": whole}
    return whole


def _blank(part: Item, key: str) -> Item:
    """What a *part* is before its text, at *key*, is told."""
    blank: Item = {"annotations": []} if "annotations" in part else {}
    return {"type": part["type"], key: "", **blank} if key else part


def _text(part: Item, at: Item, stem: str, key: str, heavy: JsonPieces) -> EventStream:
    text = part.get(key) or ""
    # OpenAI's types ask for the list, empty or not.
    pieces = {"logprobs": b"[]", **heavy} if stem == "output_text" else {}
    if text:
        yield {"type": f"response.{stem}.delta", **at, "delta": text}, pieces
    for number, annotation in enumerate(part.get("annotations") or []):
        noted = {"annotation_index": number, "annotation": annotation}
        yield {"type": f"response.{stem}.annotation.added", **at, **noted}, {}
    yield {"type": f"response.{stem}.done", **at, key: text}, pieces
