"""Validate Responses bodies, complete answers, and build errors in the format of OpenAI."""

from __future__ import annotations

import pytest

from gymsdk import responses
from gymsdk.convert.api import ApiError, InvalidRequest
from gymsdk.convert.apis import INBOUND_APIS
from gymsdk.convert.responses import RESPONSES_API
from gymsdk.responses import build_usage
from gymsdk.types import Item

TOKENS = {"prompt_token_ids": [1, 2], "generation_token_ids": [3], "generation_log_probs": [-0.5]}
HISTORY = [
    {"role": "user", "content": "add"},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "1 and 2"}], "status": None},
    {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": None},
    {"type": "function_call", "name": "add", "arguments": "{}", "call_id": "c1"} | TOKENS,
    {"type": "function_call_output", "call_id": "c1", "output": "3"},
    {"role": "assistant", "content": [{"type": "output_text", "text": "3"}], "phase": None},
]


@pytest.mark.parametrize("input_", ["hi", [], HISTORY])
def test_a_valid_body_is_the_request_itself(input_: object) -> None:
    tools = [{"type": "function", "name": "add"}]
    body = {"model": "m", "input": input_, "tools": tools, "surprise": 3, "reasoning": None}
    assert RESPONSES_API.parse_request(body | {"stream": True, "stream_options": {}}) == body


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": 7}, "input"),
        ({"input": ["x"]}, "input"),
        ({"input": [{"role": "user", "content": 7}]}, "input"),
        ({"input": [{"role": "user", "content": ["x"]}]}, "input"),
        ({"input": "x", "tools": 7}, "tools"),
        ({"input": "x", "tools": ["add"]}, "tools"),
        ({"input": "x", "background": True}, "background"),
        ({"input": "x", "include": "all"}, "include"),
        ({"input": "x", "reasoning": "low"}, "reasoning"),
        ({"input": "x", "metadata": []}, "metadata"),
        ({"input": "x", "text": {"format": "json"}}, "text.format"),
        ({"input": "x", "text": {"format": {"name": "n"}}}, "text.format.type"),
        ({"input": [{"type": "reasoning", "summary": ["hmm"]}]}, "input"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": {"a": 1}}]}, "input"),
    ],
)
def test_an_invalid_request_is_rejected(body: Item, param: str) -> None:
    with pytest.raises(InvalidRequest, match=param) as caught:
        RESPONSES_API.parse_request(body)
    assert caught.value.param == param


def test_unknown_usage_details_are_zero() -> None:
    usage = RESPONSES_API.build_answer(responses.build_response([], model="m", usage=build_usage(3, 4)), {})["usage"]
    assert usage["input_tokens_details"] == {"cached_tokens": 0}
    assert usage["output_tokens_details"] == {"reasoning_tokens": 0}


def test_missing_fields_of_a_response_are_filled_in() -> None:
    output = [{"role": "assistant", "content": "hi"}, {"type": "function_call", "name": "add", "call_id": "c"}]
    answer = RESPONSES_API.build_answer({"output": output}, {"model": "m", "temperature": 0.5})
    assert answer.keys() >= responses.build_response([], model="m").keys()
    assert (answer["model"], answer["temperature"]) == ("m", 0.5)
    message, call = answer["output"]
    assert message["content"] == [{"type": "output_text", "text": "hi", "annotations": []}]
    assert (message["type"], message["id"][:4], call["id"][:3]) == ("message", "msg_", "fc_")


def test_a_complete_response_is_unchanged() -> None:
    response = responses.build_response([responses.build_message("hi") | TOKENS], model="m")
    answer = RESPONSES_API.build_answer(response, {})
    assert answer == response
    assert answer["output"][0] is response["output"][0]


@pytest.mark.parametrize(
    ("kind", "statuses"),
    [
        ("invalid_request_error", [400, 422]),
        ("authentication_error", [401]),
        ("permission_error", [403]),
        ("not_found_error", [404]),
        ("rate_limit_error", [429]),
        ("server_error", [500, 503]),
    ],
)
@pytest.mark.parametrize("path", ["responses", "chat/completions"])
def test_errors_have_the_format_of_openai(path: str, kind: str, statuses: list[int]) -> None:
    for status in statuses:
        error = INBOUND_APIS[path].build_error(ApiError(status, "No.", code="c", param="p"))
        assert error == {"error": {"message": "No.", "type": kind, "param": "p", "code": "c"}}
