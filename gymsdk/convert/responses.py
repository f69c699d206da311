"""Convert Responses to and from Responses: prepare bodies, validate requests, and complete answers.

Outbound, `build_body` and `parse_answer` talk to a server that offers the Responses API. Inbound, `RESPONSES_API`
validates the requests of clients and completes Responses for them.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import replace
from typing import Any, TypeAlias

from gymsdk import responses
from gymsdk.convert import api, chat, tokens
from gymsdk.convert import content as parts
from gymsdk.convert.api import (
    HEARTBEAT_FRAME,
    ApiError,
    InboundApi,
    InvalidRequest,
    build_error,
    build_frame,
    dump_line,
    join_json_list,
    splice_json,
)
from gymsdk.convert.arguments import repair_items
from gymsdk.convert.request_keys import RESPONSES_KEYS, select_keys
from gymsdk.convert.tokens import CARRIED_FIELDS
from gymsdk.errors import Failed
from gymsdk.responses import fill_usage_details, normalize_usage, read_text
from gymsdk.types import Item, extract_text, find_invalid_param, is_object_list, is_policy_item, is_reply

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


RESPONSES_PATH = "responses"
INPUT_TOKENS_PATH = "responses/input_tokens"

INPUT_TOKENS_KEYS = frozenset(
    {
        "conversation",
        "input",
        "instructions",
        "model",
        "parallel_tool_calls",
        "personality",
        "previous_response_id",
        "reasoning",
        "text",
        "tool_choice",
        "tools",
        "truncation",
    }
)
"""The keys of a request that counts input tokens; servers refuse others."""

USAGE_DETAIL_FIELDS = ("input_tokens_details", "output_tokens_details")

STREAM_FIELDS = ("stream", "stream_options")

REQUIRED_RESPONSE_FIELDS = frozenset(
    {"created_at", "id", "model", "object", "parallel_tool_calls", "status", "tool_choice", "tools"}
)
ID_PREFIXES = {"message": "msg", "function_call": "fc", "reasoning": "rs"}

MAX_REMEMBERED_IDS = 65_536
"""The number of ids of reasoning items to remember, about eight megabytes."""


def build_body(request: Item, *, passes_unknown: bool = False) -> Item:
    """Return the body to send for *request*: with the fields from its metadata, without streaming options.

    The arguments of function calls that are no JSON object become one, because servers reject them.

    Args:
        request: The Responses request.
        passes_unknown: Whether to send keys that gymsdk does not know.

    Raises:
        Failed: The request has no tools, but its `tool_choice` demands a call, or it has a key that is refused.
    """
    known = select_keys(request, RESPONSES_KEYS, passes_unknown=passes_unknown)
    if not request.get("tools"):
        parts.check_tool_choice(request.get("tool_choice"))
    if isinstance(items := known.get("input"), list):
        known = known | {"input": tokens.keep_last_ids(repair_items(items))}
    body = chat.expand_metadata_extras(known)
    for key in STREAM_FIELDS:
        body.pop(key, None)
    return body


def parse_answer(answer: Any, request: Item, *, strict: bool = False) -> Item:
    """Return a server's *answer* to *request* as a complete Response.

    Reasoning in the text becomes separate items. Token fields are kept unchanged.

    Args:
        answer: The answer of the server.
        request: The Responses request.
        strict: Whether to reject invalid token fields.

    Raises:
        Failed: The answer is not a Response, reports an error, or has invalid token fields and *strict* is true.
    """
    if not isinstance(answer, dict) or not is_object_list(answer.get("output")):
        raise Failed(f"the model's answer is not a Response: {answer}", kind="model_bad_answer", retryable=True)
    if answer.get("error") or not responses.is_finished(answer):
        reason = answer.get("error") or f"the status of its answer is {answer['status']!r}"
        raise Failed(f"the model failed: {reason}", kind="model_error", retryable=True)
    if strict:
        for item in answer["output"]:
            tokens.check_token_fields(item)
    # A new id takes longer than the rest of the Response.
    given_id = str(answer["id"]) if answer.get("id") else None
    defaults = responses.build_response([], model=str(request.get("model", "")), request=request, id=given_id)
    return defaults | answer | {"output": list(_separate_reasoning(answer["output"])), "usage": _parse_usage(answer)}


def _separate_reasoning(output: list[Item]) -> Iterator[Item]:
    """Yield the items of *output*, each text after the reasoning that the server left in it."""
    for item in output:
        if is_reply(item) and _has_think_tag(item.get("content")):
            yield from _split_reply(item)
        else:
            yield item


def _has_think_tag(content: object) -> bool:
    if isinstance(content, str):
        return parts.THINK_START in content or parts.THINK_END in content
    return is_object_list(content) and any(_has_think_tag(part.get("text")) for part in content)


def _split_reply(item: Item) -> Iterator[Item]:
    """Yield the reasoning in the text of *item*, and the remaining item; the last one carries the token fields."""
    content = item["content"]
    content_parts = (
        [{"type": "output_text", "text": content, "annotations": []}] if isinstance(content, str) else content
    )
    split = [(part, *parts.split_think_blocks(read_text(part.get("text")))) for part in content_parts]
    reasoning = [text for _, blocks, _ in split for text in blocks]
    remaining = [part | {"text": text} if "text" in part else part for part, _, text in split]
    items: list[Item] = [responses.build_reasoning(*reasoning)] if reasoning else []
    if not reasoning or extract_text(remaining).strip() or any(part.get("refusal") for part in remaining):
        items.append(item | {"content": remaining})
    items[-1] |= {key: item[key] for key in tokens.CARRIED_FIELDS if key in item}
    yield from items


def _parse_usage(answer: Item) -> Item | None:
    """Return the usage of *answer* with valid counts, `None` if it is missing or not an object."""
    reported = answer.get("usage")
    if not isinstance(reported, dict) or not reported:
        return None
    usage = normalize_usage(reported)
    details = {key: reported[key] | usage[key] for key in USAGE_DETAIL_FIELDS if isinstance(reported.get(key), dict)}
    return reported | usage | details


class ReasoningFilter:
    """Converts requests for a hosted model, which accepts only its own reasoning.

    Its own reasoning is encrypted, or has an id from an earlier answer that the provider stores. All other reasoning
    is dropped.

    Args:
        max_ids: The number of ids to remember.
        passes_unknown: Whether to send keys that gymsdk does not know.
    """

    def __init__(self, max_ids: int = MAX_REMEMBERED_IDS, *, passes_unknown: bool = False) -> None:
        self._max_ids = max_ids
        self._passes_unknown = passes_unknown
        self._stored_ids: dict[str, None] = {}

    def build_body(self, request: Item) -> Item:
        """Return the body to send, without the reasoning of other models."""
        items = request.get("input")
        filtered = request | {"input": list(self._filter(items))} if isinstance(items, list) else request
        return build_body(filtered, passes_unknown=self._passes_unknown)

    def parse_answer(self, answer: Any, request: Item, *, strict: bool = False) -> Item:
        """Return the *answer* to *request* as a complete Response, and remember its reasoning items."""
        response = parse_answer(answer, request, strict=strict)
        # Without storage the provider does not recognize the ids later.
        if response.get("store", request.get("store")) is not False:
            self._remember(answer["output"])
        return response

    def _filter(self, items: list[Item]) -> Iterator[Item]:
        reasoning_dropped = False
        for item in items:
            if item.get("type") == "reasoning":
                reasoning_dropped = not (item.get("encrypted_content") or str(item.get("id")) in self._stored_ids)
                if not reasoning_dropped:
                    yield item
                continue
            reasoning_dropped = reasoning_dropped and is_policy_item(item)
            # A provider that recognizes the id of an item also demands the reasoning before it.
            yield {key: value for key, value in item.items() if key != "id"} if reasoning_dropped else item

    def _remember(self, output: list[Item]) -> None:
        ids = [str(item["id"]) for item in output if item.get("type") == "reasoning" and item.get("id")]
        self._stored_ids |= dict.fromkeys(ids)
        while len(self._stored_ids) > self._max_ids:
            self._stored_ids.pop(next(iter(self._stored_ids)), None)


def parse_request(body: Item) -> Item:
    """Validate the *body* of a client and return it as a Responses request, without streaming options.

    Raises:
        InvalidRequest: The body is invalid, or asks for background processing.
    """
    if body.get("input") is None:
        raise api.build_invalid_field("input", "a string or a list of items")
    if invalid := find_invalid_param(body):
        field, expected = invalid
        # Clients know the parameter, not the path in its list.
        name = field.partition(".")[0]
        raise InvalidRequest(f"{field} must be {expected}", name if name in {"input", "tools"} else field)
    if body.get("background"):
        raise InvalidRequest("this server does not support 'background'; leave it out", "background")
    return {key: value for key, value in body.items() if key not in STREAM_FIELDS}


def parse_count_request(body: Item) -> Item:
    """Validate the *body* of a client that counts input tokens, and return it as a Responses request.

    Raises:
        InvalidRequest: The body is invalid, or has neither an input nor instructions.
    """
    if body.get("input") is None and body.get("instructions"):
        body = body | {"input": []}
    return parse_request(body)


def format_input_tokens(tokens: int) -> Item:
    """Return the answer of `/v1/responses/input_tokens` for an input of so many *tokens*."""
    return {"object": "response.input_tokens", "input_tokens": tokens}


def build_answer(response: Item, body: Item) -> Item:
    """Return *response* with all fields that OpenAI's types require: ids, types, and counts."""
    if not response.keys() >= REQUIRED_RESPONSE_FIELDS:
        response = responses.build_response([], model=str(body.get("model") or ""), request=body) | response
    return fill_usage_details(response | {"output": [_complete_item(item) for item in response["output"]]})


def _complete_item(item: Item) -> Item:
    kind, content = item.get("type") or "message", item.get("content")
    if item.get("id") and item.get("type") and not isinstance(content, str):
        return item
    added = {"id": item.get("id") or responses.generate_id(ID_PREFIXES.get(kind, kind)), "type": kind}
    if isinstance(content, str):
        added["content"] = [{"type": "output_text", "text": content, "annotations": []}]
    return item | added


RESPONSES_API = InboundApi(
    path=RESPONSES_PATH,
    parse_request=parse_request,
    build_answer=build_answer,
    stream_events=stream_events,
    build_error=build_error,
    build_error_frames=build_error_frames,
    heartbeat=HEARTBEAT_FRAME,
    echoes_token_ids=True,
)

INPUT_TOKENS_API = replace(RESPONSES_API, path=INPUT_TOKENS_PATH, parse_request=parse_count_request)
