"""Check the builders with the models of the openai SDK."""

from __future__ import annotations

import json

import pytest
from openai.types.responses import Response

from gymsdk import responses
from gymsdk.convert.token_limits import is_context_overflow
from gymsdk.responses import build_usage

TOOL = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": True}


def test_a_response_is_valid_for_the_sdk() -> None:
    output = [
        responses.build_reasoning("hmm"),
        responses.build_message("hello"),
        responses.build_function_call("add", {"a": "é"}, "c1"),
    ]
    request = {"tools": [TOOL], "temperature": 0.5, "instructions": "Add.", "metadata": {"a": "b"}}
    read = Response.model_validate(responses.build_response(output, model="m", request=request))
    assert (read.output_text, read.instructions, read.temperature) == ("hello", "Add.", 0.5)
    assert [item.type for item in read.output] == ["reasoning", "message", "function_call"]


def test_usage_has_a_total_and_no_invented_details() -> None:
    usage = build_usage(3, 4, cached_tokens=1)
    assert usage["total_tokens"] == 7
    assert usage["input_tokens_details"] == {"cached_tokens": 1}
    assert usage["output_tokens_details"] == {"reasoning_tokens": None}


def test_an_incomplete_response_is_valid_for_the_sdk() -> None:
    told = responses.build_overflow_response("too long", model="m", request={})
    read = Response.model_validate(told | {"usage": None})
    assert told["usage"] == build_usage(cached_tokens=0, reasoning_tokens=0)
    assert read.incomplete_details is not None
    assert (read.status, read.incomplete_details.reason, read.output) == ("incomplete", "max_output_tokens", [])


def test_text_arguments_are_verbatim() -> None:
    assert responses.build_function_call("add", '{"a" :1', "c1")["arguments"] == '{"a" :1'
    assert json.loads(responses.build_function_call("add", {"a": "é"})["arguments"]) == {"a": "é"}


def test_ids_are_new_unless_given() -> None:
    assert responses.build_message("x")["id"] != responses.build_message("x")["id"]
    assert responses.build_message("x", id="msg_1")["id"] == "msg_1"
    assert (
        responses.build_function_call("add", "{}")["call_id"] != responses.build_function_call("add", "{}")["call_id"]
    )


@pytest.mark.parametrize("key", ["tools", "tool_choice", "parallel_tool_calls"])
def test_a_null_in_the_request_is_the_default_in_the_response(key: str) -> None:
    assert (
        responses.build_response([], model="m", request={key: None})[key]
        == responses.build_response([], model="m")[key]
    )


def overflowed(body: object, status: int = 422) -> bool:
    return is_context_overflow(status, json.dumps(body).encode())


PROMPT = {"messages": [{"role": "user", "content": "What is a context window? What is the maximum model length?"}]}


@pytest.mark.parametrize(
    "body",
    [
        {"detail": [{"type": "missing", "loc": ["body", "tools"], "msg": "Field required", "input": PROMPT}]},
        {"error": {"message": f"[{{'type': 'missing', 'msg': 'Field required', 'input': {PROMPT}}}]"}},
        {"error": {"message": f"1 validation error: Field required [type=missing, input_value={PROMPT}]"}},
        {"error": {"message": "bad field", "body": PROMPT}},
        PROMPT,
        "context window",
        [PROMPT],
        {"error": None, "message": 7},
    ],
)
def test_request_text_in_an_error_is_not_an_overflow(body: object) -> None:
    assert not overflowed(body)


def test_an_error_that_is_not_json_is_not_an_overflow() -> None:
    assert not is_context_overflow(400, b"<h1>What is a context window?</h1>")
    assert not is_context_overflow(400, b"\xff\xfe context window")


@pytest.mark.parametrize(
    "body",
    [
        {"error": {"message": "too long", "code": "context_length_exceeded"}},
        {"error": {"message": "the request exceeds the available context size", "code": 400}},
        {"error": "prompt is too long"},
        {"object": "error", "message": "This model's maximum context length is 8 tokens", "code": 400},
        {"detail": "exceeds the context window"},
    ],
)
def test_an_overflow_message_of_the_server_is_an_overflow(body: object) -> None:
    assert overflowed(body)
    assert not overflowed(body, 500)
