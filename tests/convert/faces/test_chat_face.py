"""A chat body as a Responses request, a Response as a chat completion."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from gymsdk import wire
from gymsdk.convert import chat
from gymsdk.convert.faces import chat as served
from gymsdk.transcript import Item

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
    "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}},
    "temperature": 0.5,
    "top_k": 20,
    "stream": False,
    "n": 1,
}


def test_messages_become_items() -> None:
    asked = served.request(BODY)
    kinds = [item.get("type", item.get("role")) for item in asked["input"]]
    assert kinds == ["system", "user", "reasoning", "message", "function_call", "function_call_output"]
    assert asked["input"][1]["content"] == [
        {"type": "input_text", "text": "add"},
        {"type": "input_image", "image_url": "u", "detail": "auto"},
    ]


def test_parameters_have_their_responses_names() -> None:
    asked = served.request(BODY)
    assert {key: value for key, value in asked.items() if key != "input"} == {
        "model": "m",
        "temperature": 0.5,
        "metadata": {"extra_body": '{"top_k": 20}'},
        "max_output_tokens": 9,
        "reasoning": {"effort": "low"},
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}},
        "tools": [TOOL],
        "tool_choice": {"type": "function", "name": "add"},
    }


def test_there_and_back_is_the_same_body() -> None:
    back = chat.body(served.request(BODY), limit="max_completion_tokens")
    back["messages"][2].pop("reasoning")
    expected = copy.deepcopy({key: value for key, value in BODY.items() if key not in {"stream", "n"}})
    expected["messages"][1]["content"][1]["image_url"]["detail"] = "auto"
    assert back == expected


def test_token_ids_come_in_on_the_last_item() -> None:
    message = {"role": "assistant", "content": "4", "reasoning": "hmm"} | TOKENS
    thought, text = served.request({"messages": [message]})["input"]
    assert {key: text[key] for key in TOKENS} == TOKENS
    assert not TOKENS.keys() & thought.keys()


@pytest.mark.parametrize(
    ("output", "finish"),
    [
        ([wire.message("hi")], "stop"),
        ([wire.reasoning("hmm"), wire.message("hi") | TOKENS], "stop"),
        (
            [wire.message("I add."), wire.function_call("add", '{"a":1}', "c1"), wire.function_call("b", "{}", "c2")],
            "tool_calls",
        ),
    ],
)
def test_a_response_survives_as_a_completion(output: list[Item], finish: str) -> None:
    response = wire.response(output, model="m", usage=wire.usage(3, 4, cached_tokens=1))
    completion = served.completion(response)
    back = chat.response(completion, {})
    without_ids = [{key: value for key, value in item.items() if key != "id"} for item in output]
    assert [{key: value for key, value in item.items() if key != "id"} for item in back["output"]] == without_ids
    assert (completion["choices"][0]["finish_reason"], back["usage"]) == (finish, response["usage"])


@pytest.mark.parametrize("reason", ["max_output_tokens", "content_filter"])
def test_an_incomplete_response_stays_incomplete(reason: str) -> None:
    response = wire.response([wire.message("x")], model="m", status="incomplete", reason=reason)
    back = chat.response(served.completion(response), {})
    assert (back["status"], back["incomplete_details"]) == ("incomplete", {"reason": reason})
