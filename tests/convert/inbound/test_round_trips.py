"""Conversions between Responses and Chat Completions lose only information that one of the APIs cannot express.

A Responses request is unchanged after a conversion to Chat Completions and back, with these exceptions:

- Items lose their id and status, because chat messages have neither.
- The instructions and the leading system and developer messages become one system message, because most chat templates
  accept only one.
- Consecutive items of the policy become one message, with reasoning, text and calls in this order. Several reasoning
  items are merged, and so are several texts. A refusal becomes text, because chat templates have no refusals.
- Arguments that are no JSON object become one that contains their text, because engines reject others.
- Content with a single text part becomes a string. Null fields, an empty list of tools and the plain text format are
  omitted.
- `metadata`, `store`, `truncation`, `max_tool_calls` and `include` (except log-probabilities) are omitted, because no
  engine accepts them.

A Response is unchanged after a conversion to a completion and back, except for its ids, merged reasoning and texts, and
the white space around the reasoning and at the start of the text after it.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gymsdk import responses
from gymsdk.convert import chat, chat_inbound
from gymsdk.convert import content as content_parts
from gymsdk.convert.arguments import repair_items
from gymsdk.convert.chat import LOGPROBS_INCLUDE
from gymsdk.convert.tokens import keep_last_ids
from gymsdk.types import Item

from .strategies import build_requests, build_responses, build_turns, reasoning_texts, texts


def without_ids(items: list[Item]) -> list[Item]:
    """Return the items without the fields that a chat does not have."""
    return [{key: value for key, value in item.items() if key not in {"id", "status"}} for item in items]


@pytest.mark.slow
@given(build_requests())
def test_a_request_survives_the_round_trip_through_chat(request: Item) -> None:
    converted = chat_inbound.parse_request(chat.build_body(request))
    # Only the last turn keeps its token ids.
    assert without_ids(converted.pop("input")) == without_ids(keep_last_ids(repair_items(request["input"])))
    assert converted == {key: value for key, value in request.items() if key != "input"}


@pytest.mark.slow
@given(build_requests())
def test_a_chat_body_survives_the_round_trip_through_responses(request: Item) -> None:
    body = chat.build_body(request)
    assert chat.build_body(chat_inbound.parse_request(body)) == body


@pytest.mark.slow
@given(build_requests(), st.booleans())
def test_both_names_of_the_token_limit_are_read(request: Item, newer: bool) -> None:
    limit_name = "max_completion_tokens" if newer else "max_tokens"
    assert chat_inbound.parse_request(chat.build_body(request, limit=limit_name)).get(
        "max_output_tokens"
    ) == request.get("max_output_tokens")


@given(build_responses())
def test_a_response_survives_the_round_trip_through_a_completion(response: Item) -> None:
    completion = chat_inbound.build_completion(response)
    converted = chat.parse_completion(completion, {})
    assert without_ids(converted["output"]) == without_ids(response["output"])
    if response["status"] == "completed":
        finish = "tool_calls" if any("call_id" in item for item in response["output"]) else "stop"
        assert completion["choices"][0]["finish_reason"] == finish
    same = ("status", "usage", "incomplete_details", "model")
    assert {key: converted[key] for key in same} == {key: response[key] for key in same}


@given(
    reasoning_texts,
    texts.map(str.lstrip),
    build_turns(refusals=False).map(lambda items: [item for item in items if "name" in item]),
)
def test_reasoning_survives_as_a_field_and_as_tags(reasoning: str, text: str, calls: list[Item]) -> None:
    response = responses.build_response(
        [responses.build_reasoning(reasoning), responses.build_message(text), *calls], model="m"
    )
    field, tags = chat_inbound.build_completion(response), chat_inbound.build_completion(response, thoughts="tags")
    assert tags["choices"][0]["message"]["content"] == content_parts.prepend_think_block(reasoning, text)
    for completion in (field, tags):
        assert without_ids(chat.parse_completion(completion, {})["output"]) == without_ids(response["output"])


def test_log_probabilities_survive_the_round_trip() -> None:
    logprobs = [{"token": "hi", "logprob": -0.1, "bytes": [104, 105], "top_logprobs": []}]
    request = chat_inbound.parse_request({"messages": [], "logprobs": True, "top_logprobs": 2})
    assert request == {"input": [], "include": [LOGPROBS_INCLUDE], "top_logprobs": 2}
    assert chat.build_body({"input": "x", "include": [LOGPROBS_INCLUDE]})["logprobs"] is True
    response = responses.build_response([responses.build_message("hi")], model="m")
    response["output"][0]["content"][0]["logprobs"] = logprobs
    completion = chat_inbound.build_completion(response)
    assert completion["choices"][0]["logprobs"] == {"content": logprobs, "refusal": None}
    assert without_ids(chat.parse_completion(completion, request)["output"]) == without_ids(response["output"])
    assert "logprobs" not in chat.parse_completion(completion, {})["output"][0]["content"][0]


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "file", "file": {"file_data": "data:application/pdf;base64,AA", "filename": "a.pdf"}}],
        [{"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}}],
        [{"type": "image_url", "image_url": {"url": "u", "detail": "high"}}, {"type": "text", "text": "what?"}],
        [{"type": "video_url", "video_url": {"url": "u"}}],
        [{"type": "audio_url", "audio_url": {"url": "u"}}],
    ],
)
@pytest.mark.parametrize("role", ["user", "tool"])
def test_content_parts_survive_the_round_trip(content: list[Any], role: str) -> None:
    message = {"role": role, "content": content} | ({"tool_call_id": "c"} if role == "tool" else {})
    assert chat.build_messages({"input": chat_inbound.parse_message(message)}) == [message]
