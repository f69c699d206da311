"""The builders against the openai SDK's own models."""

from __future__ import annotations

import json

import pytest
from openai.types.responses import Response

from gymsdk import wire

TOOL = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": True}


def test_a_response_is_what_the_sdk_calls_one() -> None:
    output = [wire.reasoning("hmm"), wire.message("hello"), wire.function_call("add", {"a": "é"}, "c1")]
    request = {"tools": [TOOL], "temperature": 0.5, "instructions": "Add.", "metadata": {"a": "b"}}
    read = Response.model_validate(wire.response(output, model="m", request=request))
    assert (read.output_text, read.instructions, read.temperature) == ("hello", "Add.", 0.5)
    assert [item.type for item in read.output] == ["reasoning", "message", "function_call"]


def test_usage_adds_up_and_does_not_invent_details() -> None:
    usage = wire.usage(3, 4, cached_tokens=1)
    assert usage["total_tokens"] == 7
    assert usage["input_tokens_details"] == {"cached_tokens": 1}
    assert usage["output_tokens_details"] == {"reasoning_tokens": None}


def test_an_incomplete_response_is_what_the_sdk_calls_one() -> None:
    read = Response.model_validate(wire.overflow("too long", model="m", request={}))
    assert read.incomplete_details is not None
    assert (read.status, read.incomplete_details.reason, read.output) == ("incomplete", "max_output_tokens", [])


def test_arguments_are_verbatim_where_they_are_text() -> None:
    assert wire.function_call("add", '{"a" :1', "c1")["arguments"] == '{"a" :1'
    assert json.loads(wire.function_call("add", {"a": "é"})["arguments"]) == {"a": "é"}


def test_ids_are_fresh_unless_given() -> None:
    assert wire.message("x")["id"] != wire.message("x")["id"]
    assert wire.message("x", id="msg_1")["id"] == "msg_1"
    assert wire.function_call("add", "{}")["call_id"] != wire.function_call("add", "{}")["call_id"]


@pytest.mark.parametrize("key", ["tools", "tool_choice", "parallel_tool_calls"])
def test_a_null_in_the_request_is_the_default_in_the_response(key: str) -> None:
    assert wire.response([], model="m", request={key: None})[key] == wire.response([], model="m")[key]
