"""The OpenAI SDK reads the same answer with and without streaming."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest
from hypothesis import given, settings

from gymsdk import responses as wire
from gymsdk.convert import chat_inbound, responses
from gymsdk.convert.api import ApiError
from gymsdk.responses import build_usage
from gymsdk.types import Item

from .conftest import BuildClient
from .strategies import TOKENS, build_responses, refusal

HI: list[Any] = [{"role": "user", "content": "hi"}]
COUNTED: Any = {"include_usage": True}
SDK = settings(max_examples=25, deadline=None)
TURN = [
    wire.build_reasoning("a", "b"),
    wire.build_message("hi"),
    wire.build_function_call("add", '{"a": 1}', "c1") | TOKENS,
]


def without_sdk_fields(value: Any) -> Any:
    """Return *value* without the fields that the SDK adds when it accumulates a stream."""
    if isinstance(value, dict):
        added = {"parsed", "parsed_arguments"}
        kept = {key: without_sdk_fields(value[key]) for key in value if key not in added and value[key] is not None}
        return {key: kept[key] for key in kept if not (key == "index" and "function" in kept)}
    return [*map(without_sdk_fields, value)] if isinstance(value, list) else value


def parse_frames(frames: bytes) -> list[Item]:
    """Parse *frames*; check that each event name equals the type in its data."""
    events = []
    for frame in frames.decode().split("\n\n")[:-1]:
        name, data = frame.removeprefix("event: ").split("\ndata: ")
        events.append(json.loads(data))
        assert name == events[-1]["type"]
    return events


def stream_events(*output: Item, **fields: Any) -> list[Item]:
    answer = responses.RESPONSES_API.build_answer(wire.build_response(list(output), model="m", **fields), {})
    return parse_frames(b"".join(responses.RESPONSES_API.stream_events(answer, {})))


@SDK
@given(build_responses())
def test_the_sdk_accumulates_the_events_of_a_response(openai_client: BuildClient, response: Item) -> None:
    client = openai_client(response)
    plain = client.responses.create(model="m", input="x")
    with client.responses.stream(model="m", input="x") as stream:
        events = list(stream)
        if response["status"] == "completed":
            assert without_sdk_fields(stream.get_final_response().to_dict()) == without_sdk_fields(plain.to_dict())
    assert events[-1].type == f"response.{response['status']}"
    assert without_sdk_fields(events[-1].response.to_dict()) == without_sdk_fields(plain.to_dict())
    done = [event.item.to_dict() for event in events if event.type == "response.output_item.done"]
    assert without_sdk_fields(done) == without_sdk_fields([item.to_dict() for item in plain.output])
    deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert deltas == plain.output_text


@SDK
@given(build_responses())
def test_the_sdk_accumulates_the_chunks_of_a_completion(openai_client: BuildClient, response: Item) -> None:
    client = openai_client(response)
    plain = client.chat.completions.create(model="m", messages=HI).to_dict()
    with client.chat.completions.stream(model="m", messages=HI, stream_options=COUNTED) as stream:
        # The SDK raises an error instead of a final completion if the answer is incomplete.
        folded = stream.until_done().current_completion_snapshot.to_dict()
    assert without_sdk_fields(folded) | {"id": plain["id"]} == without_sdk_fields(plain)


def test_events_are_sent_in_order() -> None:
    events = stream_events(*TURN)
    kinds = [event["type"].removeprefix("response.") for event in events]
    summary = [f"reasoning_summary_{word}" for word in ("part.added", "text.delta", "text.done", "part.done")]
    text = ["content_part.added", "output_text.delta", "output_text.done", "content_part.done"]
    call = ["function_call_arguments.delta", "function_call_arguments.done"]
    items = [["output_item.added", *inner, "output_item.done"] for inner in (summary * 2, text, call)]
    assert kinds == ["created", "in_progress", *chain(*items), "completed"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    places = {(event["output_index"], event["item_id"]) for event in events if "item_id" in event}
    assert places == {(place, item["id"]) for place, item in enumerate(TURN)}
    assert [event["summary_index"] for event in events if "summary_index" in event] == [0] * 4 + [1] * 4
    begun = [event["item"] for event in events if event["type"].endswith("item.added")]
    assert [item["status"] for item in begun] == ["in_progress"] * 3
    assert (begun[0]["summary"], begun[1]["content"], begun[2]["arguments"]) == ([], [], "")
    assert not TOKENS.keys() & begun[2].keys()
    assert TOKENS.items() <= events[-2]["item"].items()
    assert events[-1]["response"]["output"] == TURN


def test_a_refusal_and_raw_reasoning_have_their_own_events() -> None:
    raw = wire.build_reasoning() | {"content": [{"type": "reasoning_text", "text": "hmm"}]}
    kinds = [event["type"].removeprefix("response.") for event in stream_events(raw, refusal("no")) if "delta" in event]
    assert kinds == ["reasoning_text.delta", "refusal.delta"]


def test_an_item_of_unknown_type_is_sent_complete() -> None:
    search = {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search"}}
    assert [event["item"] for event in stream_events(search) if "item" in event] == [search, search]


def test_annotations_and_log_probabilities_are_sent_after_the_start() -> None:
    note = {"type": "url_citation", "url": "u", "title": "t", "start_index": 0, "end_index": 1}
    logprobs = [{"token": "hi", "logprob": -0.1, "bytes": [104, 105], "top_logprobs": []}]
    message = wire.build_message("hi")
    message["content"][0] |= {"annotations": [note], "logprobs": logprobs}
    events = {event["type"].removeprefix("response."): event for event in stream_events(message)}
    assert events["output_text.annotation.added"]["annotation"] == note
    assert events["output_text.delta"]["logprobs"] == logprobs
    assert events["content_part.added"]["part"] == {"type": "output_text", "text": "", "annotations": []}
    assert events["completed"]["response"]["output"] == [message]


def test_no_frame_contains_a_line_separator_and_half_a_surrogate_pair_reaches_the_client() -> None:
    *_, last = stream_events(wire.build_message("\ud83d"))
    assert last["response"]["output"][0]["content"][0]["text"] == "\ud83d"
    response = wire.build_response([wire.build_message("a\u2028\u2029\x85\x0b\x1cb")], model="m")
    for inbound_api in (responses.RESPONSES_API, chat_inbound.CHAT_API):
        frames = b"".join(inbound_api.stream_events(inbound_api.build_answer(response, {}), {})).decode()
        assert all(line.startswith(("event: ", "data: ")) for line in frames.splitlines() if line)


def test_usage_is_a_separate_chunk_on_request(openai_client: BuildClient) -> None:
    response = wire.build_response([wire.build_message("hi")], model="m", usage=build_usage(1, 2))
    create = openai_client(response).chat.completions.create
    chunks = list(create(model="m", messages=HI, stream=True))
    assert [chunk.choices[0].delta.content for chunk in chunks] == ["", "hi", None]
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, "stop"]
    assert "usage" not in chunks[0].to_dict()
    *others, last = create(model="m", messages=HI, stream=True, stream_options=COUNTED)
    assert (last.choices, last.usage.total_tokens) == ([], 3)
    assert all(chunk.usage is None for chunk in others)


def test_parallel_calls_have_different_indexes(openai_client: BuildClient) -> None:
    calls = [wire.build_function_call("add", f'{{"a": {n}}}', f"c{n}") for n in range(2)]
    response = wire.build_response(calls, model="m")
    chunks = openai_client(response).chat.completions.create(model="m", messages=HI, stream=True)
    deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert [(call.index, call.id, call.function.arguments) for call in deltas] == [
        (0, "c0", ""),
        (0, None, '{"a": 0}'),
        (1, "c1", ""),
        (1, None, '{"a": 1}'),
    ]


@pytest.mark.parametrize(
    ("status", "kind"), [(400, "invalid_request_error"), (429, "rate_limit_error"), (503, "server_error")]
)
def test_a_failing_stream_raises_the_same_error_as_an_error_response(
    openai_client: BuildClient, status: int, kind: str
) -> None:
    from openai import APIError

    client = openai_client(ApiError(status, "no such luck", code="unlucky", param="luck"))
    asking: list[Callable[..., Any]] = [
        lambda **more: client.responses.create(model="m", input="x", **more),
        lambda **more: client.chat.completions.create(model="m", messages=HI, **more),
    ]
    for ask in asking:
        with pytest.raises(APIError, match="no such luck") as plain:
            ask()
        with pytest.raises(APIError, match="no such luck") as broken:
            list(ask(stream=True))
        assert broken.value.body == plain.value.body
        assert (broken.value.code, broken.value.param, broken.value.type) == ("unlucky", "luck", kind)
    frames = parse_frames(responses.RESPONSES_API.build_error_frames(ApiError(status, "no such luck")))
    assert [event["type"] for event in frames] == ["response.created", "response.failed", "error"]
    assert frames[1]["response"]["error"] == {"code": kind, "message": "no such luck"}
