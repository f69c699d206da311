"""OpenAI's SDK reads the same answer from a stream as without one."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from openai import APIError, OpenAI

from gymsdk import responses as wire
from gymsdk.convert import chat_inbound, responses
from gymsdk.convert.api import ApiError
from gymsdk.types import Item

from .said import TOKENS, answers, refusal

HI: list[Any] = [{"role": "user", "content": "hi"}]
COUNTED: Any = {"include_usage": True}
SDK = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
TURN = [
    wire.build_reasoning("a", "b"),
    wire.build_message("hi"),
    wire.build_function_call("add", '{"a": 1}', "c1") | TOKENS,
]


def bare(value: Any) -> Any:
    """A *value* without what the SDK adds to it as it folds."""
    if isinstance(value, dict):
        added = {"parsed", "parsed_arguments"}
        kept = {key: bare(each) for key, each in value.items() if key not in added and each is not None}
        return {key: each for key, each in kept.items() if not (key == "index" and "function" in kept)}
    return [bare(each) for each in value] if isinstance(value, list) else value


def told(frames: bytes) -> list[Item]:
    """The data of *frames*, each event named as its data says."""
    events = []
    for frame in frames.decode().split("\n\n")[:-1]:
        name, data = frame.removeprefix("event: ").split("\ndata: ")
        events.append(json.loads(data))
        assert name == events[-1]["type"]
    return events


def streamed(*output: Item, **fields: Any) -> list[Item]:
    answer = responses.RESPONSES_API.build_answer(wire.build_response(list(output), model="m", **fields), {})
    return told(b"".join(responses.RESPONSES_API.stream_events(answer, {})))


@SDK
@given(answers())
def test_a_stream_of_responses_ends_with_the_response(served: Callable[..., OpenAI], said: Item) -> None:
    client = served(said)
    plain = client.responses.create(model="m", input="x")
    *_, last = client.responses.create(model="m", input="x", stream=True)
    assert last.type == f"response.{said['status']}"
    assert last.response.to_dict() == plain.to_dict()


@SDK
@given(answers())
def test_the_sdk_folds_the_events_of_a_response(served: Callable[..., OpenAI], said: Item) -> None:
    client = served(said)
    plain = client.responses.create(model="m", input="x")
    with client.responses.stream(model="m", input="x") as stream:
        events = list(stream)
        if said["status"] == "completed":
            assert bare(stream.get_final_response().to_dict()) == bare(plain.to_dict())
    done = [event.item.to_dict() for event in events if event.type == "response.output_item.done"]
    assert bare(done) == bare([item.to_dict() for item in plain.output])
    deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert deltas == plain.output_text


@SDK
@given(answers())
def test_the_sdk_folds_the_chunks_of_a_completion(served: Callable[..., OpenAI], said: Item) -> None:
    client = served(said)
    plain = client.chat.completions.create(model="m", messages=HI).to_dict()
    with client.chat.completions.stream(model="m", messages=HI, stream_options=COUNTED) as stream:
        # The final completion is no answer to the SDK where it was cut short.
        folded = stream.until_done().current_completion_snapshot.to_dict()
    assert bare(folded) | {"id": plain["id"]} == bare(plain)


def test_events_are_sent_in_order() -> None:
    kinds = [event["type"].removeprefix("response.") for event in streamed(*TURN)]
    summary = [f"reasoning_summary_{word}" for word in ("part.added", "text.delta", "text.done", "part.done")]
    text = ["content_part.added", "output_text.delta", "output_text.done", "content_part.done"]
    call = ["function_call_arguments.delta", "function_call_arguments.done"]
    items = [["output_item.added", *inner, "output_item.done"] for inner in (summary * 2, text, call)]
    assert kinds == ["created", "in_progress", *chain(*items), "completed"]


def test_events_are_numbered_and_say_where_they_belong() -> None:
    events = streamed(*TURN)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    places = {(event["output_index"], event["item_id"]) for event in events if "item_id" in event}
    assert places == {(place, item["id"]) for place, item in enumerate(TURN)}
    assert [event["summary_index"] for event in events if "summary_index" in event] == [0] * 4 + [1] * 4


def test_the_first_event_of_an_item_has_only_its_initial_fields() -> None:
    begun = [event["item"] for event in streamed(*TURN) if event["type"].endswith("item.added")]
    assert [item["status"] for item in begun] == ["in_progress"] * 3
    assert (begun[0]["summary"], begun[1]["content"], begun[2]["arguments"]) == ([], [], "")
    assert not TOKENS.keys() & begun[2].keys()


def test_tokens_come_with_the_done_item_and_with_the_whole_response() -> None:
    *_, done, last = streamed(*TURN)
    assert TOKENS.items() <= done["item"].items()
    assert last["response"]["output"] == TURN


def test_a_refusal_and_raw_reasoning_have_their_own_events() -> None:
    raw = wire.build_reasoning() | {"content": [{"type": "reasoning_text", "text": "hmm"}]}
    kinds = [event["type"].removeprefix("response.") for event in streamed(raw, refusal("no")) if "delta" in event]
    assert kinds == ["reasoning_text.delta", "refusal.delta"]


def test_an_item_of_unknown_type_is_sent_complete() -> None:
    search = {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search"}}
    assert [event["item"] for event in streamed(search) if "item" in event] == [search, search]


def test_annotations_and_log_probabilities_are_sent_after_the_start() -> None:
    note = {"type": "url_citation", "url": "u", "title": "t", "start_index": 0, "end_index": 1}
    chances = [{"token": "hi", "logprob": -0.1, "bytes": [104, 105], "top_logprobs": []}]
    said = wire.build_message("hi")
    said["content"][0] |= {"annotations": [note], "logprobs": chances}
    events = {event["type"].removeprefix("response."): event for event in streamed(said)}
    assert events["output_text.annotation.added"]["annotation"] == note
    assert events["output_text.delta"]["logprobs"] == chances
    assert events["content_part.added"]["part"] == {"type": "output_text", "text": "", "annotations": []}
    assert events["completed"]["response"]["output"] == [said]


def test_half_a_surrogate_pair_reaches_the_client() -> None:
    *_, last = streamed(wire.build_message("\ud83d"))
    assert last["response"]["output"][0]["content"][0]["text"] == "\ud83d"


@pytest.mark.parametrize("mark", ["\u2028", "\u2029", "\x85", "\x0b", "\x1c"])
def test_no_frame_has_a_line_end_of_any_kind_in_it(mark: str) -> None:
    said = wire.build_response([wire.build_message(f"a{mark}b")], model="m")
    for face in (responses.RESPONSES_API, chat_inbound.CHAT_API):
        frames = b"".join(face.stream_events(face.build_answer(said, {}), {})).decode()
        assert all(line.startswith(("event: ", "data: ")) for line in frames.splitlines() if line)


def test_a_completion_of_one_word_is_three_chunks_and_done(served: Callable[..., OpenAI]) -> None:
    said = wire.build_response([wire.build_message("hi")], model="m", usage=wire.build_usage(1, 2))
    chunks = list(served(said).chat.completions.create(model="m", messages=HI, stream=True))
    assert [chunk.choices[0].delta.content for chunk in chunks] == ["", "hi", None]
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, "stop"]
    assert "usage" not in chunks[0].to_dict()


def test_usage_is_a_separate_chunk_on_request(served: Callable[..., OpenAI]) -> None:
    said = wire.build_response([wire.build_message("hi")], model="m", usage=wire.build_usage(1, 2))
    *others, last = served(said).chat.completions.create(
        model="m", messages=HI, stream=True, stream_options={"include_usage": True}
    )
    assert (last.choices, last.usage.total_tokens) == ([], 3)
    assert all(chunk.usage is None for chunk in others)


def test_parallel_calls_have_different_indexes(served: Callable[..., OpenAI]) -> None:
    calls = [wire.build_function_call("add", f'{{"a": {n}}}', f"c{n}") for n in range(2)]
    said = wire.build_response(calls, model="m")
    chunks = served(said).chat.completions.create(model="m", messages=HI, stream=True)
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
    served: Callable[..., OpenAI], status: int, kind: str
) -> None:
    client = served(ApiError(status, "no such luck", code="unlucky", param="luck"))
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


def test_a_failing_stream_first_sends_a_failed_response(served: Callable[..., OpenAI]) -> None:
    seen = []
    with (
        pytest.raises(APIError, match="no such luck"),
        served(ApiError(503, "no such luck")).responses.stream(model="m", input="x") as stream,
    ):
        seen.extend(stream)
    frames = told(responses.RESPONSES_API.build_error_frames(ApiError(503, "no such luck")))
    assert [event["type"] for event in frames] == ["response.created", "response.failed", "error"]
    assert frames[1]["response"]["error"] == {"code": "server_error", "message": "no such luck"}
