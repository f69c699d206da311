"""Convert chat bodies to Responses requests, and Responses to chat completions."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from gymsdk import responses
from gymsdk.convert import chat, chat_inbound
from gymsdk.convert.api import InvalidRequest
from gymsdk.types import Item

TOOL = {"type": "function", "name": "add", "description": "Adds.", "parameters": {"type": "object"}, "strict": True}
TOKENS = {"prompt_token_ids": [1, 2], "generation_token_ids": [3], "generation_log_probs": [-0.5]}
BODY: dict[str, Any] = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "S"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "add"}, {"type": "image_url", "image_url": {"url": "u"}}],
        },
        {
            "role": "assistant",
            "content": "I add.",
            "reasoning_content": "hmm",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
    ],
    "tools": [{"type": "function", "function": {key: value for key, value in TOOL.items() if key != "type"}}],
    "tool_choice": {"type": "function", "function": {"name": "add"}},
    "max_completion_tokens": 9,
    "reasoning_effort": "low",
    "verbosity": "low",
    "parallel_tool_calls": False,
    "top_p": 0.9,
    "user": "u",
    "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}},
    "temperature": 0.5,
    "top_k": 20,
    "stream": False,
    "n": 1,
}


def test_a_body_becomes_a_request() -> None:
    request = chat_inbound.parse_request(BODY)
    items = request.pop("input")
    kinds = [item.get("type", item.get("role")) for item in items]
    assert kinds == ["system", "user", "reasoning", "message", "function_call", "function_call_output"]
    image = {"type": "input_image", "image_url": "u", "detail": "auto"}
    assert items[1]["content"] == [{"type": "input_text", "text": "add"}, image]
    assert request == {
        "model": "m",
        "temperature": 0.5,
        "top_k": 20,
        "top_p": 0.9,
        "user": "u",
        "parallel_tool_calls": False,
        "max_output_tokens": 9,
        "reasoning": {"effort": "low"},
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}, "verbosity": "low"},
        "tools": [TOOL],
        "tool_choice": {"type": "function", "name": "add"},
    }


def test_a_body_survives_the_round_trip() -> None:
    converted = chat.build_body(chat_inbound.parse_request(BODY), limit="max_completion_tokens")
    converted["messages"][2].pop("reasoning")
    expected = copy.deepcopy({key: value for key, value in BODY.items() if key not in {"stream", "n"}})
    expected["messages"][1]["content"][1]["image_url"]["detail"] = "auto"
    assert converted == expected


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"max_completion_tokens": 9, "max_tokens": 7}, {"max_output_tokens": 9}),
        ({"max_completion_tokens": 0, "max_tokens": 7}, {"max_output_tokens": 0}),
        ({"max_tokens": 7}, {"max_output_tokens": 7}),
        ({"verbosity": "low"}, {"text": {"verbosity": "low"}}),
        ({"response_format": {"type": "json_object"}}, {"text": {"format": {"type": "json_object"}}}),
        ({"tool_choice": "required"}, {"tool_choice": "required"}),
        (
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "add"}}]},
                }
            },
            {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "add"}]}},
        ),
        ({"stop": ["x"], "seed": 1, "min_p": 0.1}, {"stop": ["x"], "seed": 1, "min_p": 0.1}),
        ({"metadata": {"extra_body": '{"top_k": 3}'}}, {"metadata": {"extra_body": '{"top_k": 3}'}}),
        ({"stream": True, "stream_options": {"include_usage": True}, "n": 1, "tools": [], "seed": None}, {}),
        ({"functions": [], "function_call": None}, {}),
        ({"an_engine_may_know_this": 1}, {"an_engine_may_know_this": 1}),
    ],
)
def test_each_field_is_translated(body: Item, expected: Item) -> None:
    assert chat_inbound.parse_request({"messages": []} | body) == expected | {"input": []}


def test_a_key_that_only_responses_has_is_ignored_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        assert chat_inbound.parse_request({"messages": [], "instructions": "x"}) == {"input": []}
    assert [record.getMessage().count("instructions") for record in caplog.records] == [1]


CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({}, "messages", "list of messages"),
        ({"messages": "hi"}, "messages", "list of messages"),
        ({"messages": ["hi"]}, "messages", "list of messages"),
        ({"messages": [{"content": "hi"}]}, "messages", "a role"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages", "role 'user' is malformed"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages", "role 'user' is malformed"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "c"}]}]}, "messages", "role 'assistant'"),
        ({"messages": [{"role": "assistant", "function_call": {"name": "f"}}]}, "messages", "tool_calls"),
        ({"messages": [{"role": "function", "name": "f", "content": "3"}]}, "messages", "tool_calls"),
        ({"messages": [], "n": 0}, "n", "from 1 to 128, got 0"),
        ({"messages": [], "n": [1]}, "n", "an integer"),
        ({"messages": [], "tools": {"type": "function"}}, "tools", "list of tools"),
        ({"messages": [], "tools": [{"type": "function", "function": {}}]}, "tools", r"tools\[0\]"),
        ({"messages": [], "functions": [{"name": "f"}]}, "functions", "send 'tools'"),
        ({"messages": [], "function_call": "auto"}, "function_call", "send 'tools'"),
        ({"messages": [], "response_format": "json"}, "response_format", "an object"),
        ({"messages": [], "response_format": {"name": "n"}}, "response_format", "a type"),
        ({"messages": [], "tool_choice": {"type": "allowed_tools", "tools": 7}}, "tool_choice", "are allowed"),
        ({"messages": [], "stream_options": []}, "stream_options", "an object"),
    ],
)
def test_an_invalid_chat_body_is_rejected(body: Item, param: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        chat_inbound.parse_request(body)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("message", "kinds"),
    [
        ({"content": "4"}, ["message"]),
        ({"content": "4", "reasoning": "2+2"}, ["reasoning", "message"]),
        ({"content": "4", "reasoning_content": "2+2", "reasoning": "2+2"}, ["reasoning", "message"]),
        ({"content": None, "tool_calls": [CALL, CALL]}, ["function_call", "function_call"]),
        ({"tool_calls": [CALL]}, ["function_call"]),
        ({"content": "I add.", "tool_calls": [CALL]}, ["message", "function_call"]),
        ({"content": ""}, ["message"]),
        ({}, ["message"]),
    ],
)
def test_an_assistant_message_becomes_the_items_of_its_turn(message: Item, kinds: list[str]) -> None:
    assert [item["type"] for item in chat_inbound.parse_message({"role": "assistant"} | message)] == kinds


@pytest.mark.parametrize(
    ("message", "content"),
    [
        (
            {"role": "assistant", "content": "<think>2+2</think>4"},
            [{"type": "output_text", "text": "<think>2+2</think>4", "annotations": []}],
        ),
        ({"role": "assistant", "content": None, "refusal": "no"}, [{"type": "refusal", "refusal": "no"}]),
        (
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
            [{"type": "refusal", "refusal": "no"}],
        ),
        ({"role": "user"}, ""),
    ],
)
def test_the_content_of_a_message_is_kept(message: Item, content: object) -> None:
    [item] = chat_inbound.parse_message(message)
    assert item["content"] == content


def test_reasoning_is_returned_under_both_names_or_as_requested() -> None:
    response = responses.build_response([responses.build_reasoning("2+2"), responses.build_message("4")], model="m")

    def build_message(**options: Any) -> Item:
        message: Item = chat_inbound.CHAT_API.build_answer(response, options)["choices"][0]["message"]
        return {key: value for key, value in message.items() if key not in {"role", "refusal"}}

    assert build_message() == {"content": "4", "reasoning_content": "2+2", "reasoning": "2+2"}
    assert build_message(include_reasoning=False) == {"content": "4"}
    assert build_message(separate_reasoning=False) == {"content": "<think>\n2+2\n</think>\n\n4"}


def test_token_ids_are_also_in_the_vllm_fields_on_request() -> None:
    response = responses.build_response([responses.build_message("hi") | TOKENS], model="m")
    plain, with_ids = (chat_inbound.CHAT_API.build_answer(response, body) for body in ({}, {"return_token_ids": True}))
    assert TOKENS.items() <= plain["choices"][0]["message"].items()
    assert "prompt_token_ids" not in plain
    assert (with_ids["prompt_token_ids"], with_ids["choices"][0]["token_ids"]) == ([1, 2], [3])
    frames = chat_inbound.CHAT_API.stream_events(with_ids, {})
    chunks = [json.loads(frame[6:]) for frame in frames if frame.startswith(b"data: {")]
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [[1, 2], None, None]
    assert chunks[-1]["choices"][0]["token_ids"] == [3]


def test_token_ids_of_a_message_go_to_the_last_item() -> None:
    message = {"role": "assistant", "content": "4", "reasoning": "hmm"} | TOKENS
    thought, text = chat_inbound.parse_request({"messages": [message]})["input"]
    assert {key: text[key] for key in TOKENS} == TOKENS
    assert not TOKENS.keys() & thought.keys()


def test_a_response_that_is_incomplete_without_a_reason_stays_incomplete() -> None:
    response = responses.build_response([responses.build_message("x")], model="m", status="incomplete")
    converted = chat.parse_completion(chat_inbound.build_completion(response), {})
    expected = ("incomplete", {"reason": "max_output_tokens"})
    assert (converted["status"], converted["incomplete_details"]) == expected
