"""Nothing is lost between the two APIs but what one of them has no word for.

A Responses request that goes through Chat Completions comes back the same, up to this:

- ids and statuses of items: a chat has none;
- the instructions and leading system and developer messages are one system message: few chat templates know more;
- the policy's items between two others are one message: thoughts, then text, then calls, in this order; several
  thoughts, and several texts, are one; what it refused comes back as text, for chat templates know no refusal;
- a content of one text is the text; what is null, an empty list of tools, or a text format that is plain says nothing;
- `metadata`, `store`, `truncation`, `include` but for log-probabilities, `max_tool_calls`: no engine takes them.

A Response that goes through a completion comes back with all of it but its ids, several thoughts or texts as one, and
the white space around its thoughts and before its text's end of thought.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gymsdk import responses
from gymsdk.convert import chat
from gymsdk.convert import chat_inbound as face
from gymsdk.convert import content as parts
from gymsdk.convert.chat import LOGPROBS_INCLUDE
from gymsdk.types import Item

from .said import answers, asked, texts, thoughts, turns


def plain(items: list[Item]) -> list[Item]:
    """The items without what a chat does not say."""
    return [{key: value for key, value in item.items() if key not in {"id", "status"}} for item in items]


@given(asked())
def test_a_request_comes_back_from_a_chat_as_it_was(request: Item) -> None:
    back = face.parse_request(chat.build_body(request))
    assert plain(back.pop("input")) == plain(request["input"])
    assert back == {key: value for key, value in request.items() if key != "input"}


@given(asked())
def test_a_chat_comes_back_from_a_request_as_it_was(request: Item) -> None:
    body = chat.build_body(request)
    assert chat.build_body(face.parse_request(body)) == body


@given(asked(), st.booleans())
def test_the_word_for_the_limit_is_the_only_difference_of_the_two(request: Item, newer: bool) -> None:
    word = "max_completion_tokens" if newer else "max_tokens"
    assert face.parse_request(chat.build_body(request, limit=word)).get("max_output_tokens") == request.get(
        "max_output_tokens"
    )


@given(answers())
def test_an_answer_comes_back_from_a_completion_as_it_was(response: Item) -> None:
    back = chat.parse_completion(face.build_completion(response), {})
    assert plain(back["output"]) == plain(response["output"])
    same = ("status", "usage", "incomplete_details", "model")
    assert {key: back[key] for key in same} == {key: response[key] for key in same}


@given(
    thoughts, texts.map(str.lstrip), turns(refusals=False).map(lambda said: [each for each in said if "name" in each])
)
def test_thoughts_come_back_as_a_field_and_as_tags(thought: str, text: str, calls: list[Item]) -> None:
    response = responses.build_response(
        [responses.build_reasoning(thought), responses.build_message(text), *calls], model="m"
    )
    field, tags = face.build_completion(response), face.build_completion(response, thoughts="tags")
    assert tags["choices"][0]["message"]["content"] == parts.prepend_think_block(thought, text)
    for completion in (field, tags):
        assert plain(chat.parse_completion(completion, {})["output"]) == plain(response["output"])


def test_allowed_tools_have_the_format_of_each_api() -> None:
    function = {"type": "function", "function": {"name": "add"}}
    body = {
        "messages": [],
        "tools": [function],
        "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [function]}},
    }
    flat = {"type": "function", "name": "add"}
    assert face.parse_request(body)["tool_choice"] == {"type": "allowed_tools", "mode": "required", "tools": [flat]}
    assert chat.build_body(face.parse_request(body)) == body


def test_log_probabilities_survive_the_round_trip() -> None:
    chances = [{"token": "hi", "logprob": -0.1, "bytes": [104, 105], "top_logprobs": []}]
    request = face.parse_request({"messages": [], "logprobs": True, "top_logprobs": 2})
    assert request == {"input": [], "include": [LOGPROBS_INCLUDE], "top_logprobs": 2}
    assert chat.build_body({"input": "x", "include": [LOGPROBS_INCLUDE]})["logprobs"] is True
    said = responses.build_response([responses.build_message("hi")], model="m")
    said["output"][0]["content"][0]["logprobs"] = chances
    completion = face.build_completion(said)
    assert completion["choices"][0]["logprobs"] == {"content": chances, "refusal": None}
    assert plain(chat.parse_completion(completion, request)["output"]) == plain(said["output"])
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
def test_parts_come_back_as_they_were(content: list[Any], role: str) -> None:
    message = {"role": role, "content": content} | ({"tool_call_id": "c"} if role == "tool" else {})
    assert chat.build_messages({"input": face.parse_message(message)}) == [message]
