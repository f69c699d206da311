"""Check the builders with the models of the openai SDK."""

from __future__ import annotations

import json

from gymsdk import responses
from gymsdk.convert.token_limits import is_context_overflow
from gymsdk.responses import build_usage

TOOL = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": True}


def test_a_response_is_valid_for_the_sdk() -> None:
    from openai.types.responses import Response

    output = [
        responses.build_reasoning("hmm"),
        responses.build_message("hello"),
        responses.build_function_call("add", {"a": "é"}, "c1"),
    ]
    request = {"tools": [TOOL], "temperature": 0.5, "instructions": "Add.", "metadata": {"a": "b"}}
    read = Response.model_validate(responses.build_response(output, model="m", request=request))
    assert (read.output_text, read.instructions, read.temperature) == ("hello", "Add.", 0.5)
    assert [item.type for item in read.output] == ["reasoning", "message", "function_call"]
    told = responses.build_overflow_response("too long", model="m", request={})
    incomplete = Response.model_validate(told | {"usage": None})
    assert told["usage"] == build_usage(cached_tokens=0, reasoning_tokens=0)
    assert incomplete.incomplete_details is not None
    assert (incomplete.status, incomplete.incomplete_details.reason) == ("incomplete", "max_output_tokens")


def test_a_null_in_the_request_is_the_default_in_the_response() -> None:
    keys = ("tools", "tool_choice", "parallel_tool_calls")
    found = responses.build_response([], model="m", request=dict.fromkeys(keys))
    default = responses.build_response([], model="m")
    assert [found[key] for key in keys] == [default[key] for key in keys]


def test_ids_and_arguments_of_items_are_those_given() -> None:
    calls = [responses.build_function_call("add", '{"a" :1'), responses.build_function_call("add", {"a": "é"})]
    assert calls[0]["arguments"] == '{"a" :1'
    assert json.loads(calls[1]["arguments"]) == {"a": "é"}
    assert calls[0]["call_id"] != calls[1]["call_id"]
    assert responses.build_message("x")["id"] != responses.build_message("x")["id"]
    assert responses.build_message("x", id="msg_1")["id"] == "msg_1"
    usage = build_usage(3, 4, cached_tokens=1)
    assert (usage["total_tokens"], usage["input_tokens_details"]) == (7, {"cached_tokens": 1})
    assert usage["output_tokens_details"] == {"reasoning_tokens": None}


PROMPT = {"messages": [{"role": "user", "content": "What is a context window? What is the maximum model length?"}]}


OVERFLOWS: list[object] = [
    {"error": {"message": "too long", "code": "context_length_exceeded"}},
    {"error": {"message": "the request exceeds the available context size", "code": 400}},
    {"error": "prompt is too long"},
    {"object": "error", "message": "This model's maximum context length is 8 tokens", "code": 400},
    {"detail": "exceeds the context window"},
]
OTHERS: list[object] = [
    {"detail": [{"type": "missing", "loc": ["body", "tools"], "msg": "Field required", "input": PROMPT}]},
    {"error": {"message": f"[{{'type': 'missing', 'msg': 'Field required', 'input': {PROMPT}}}]"}},
    {"error": {"message": f"1 validation error: Field required [type=missing, input_value={PROMPT}]"}},
    {"error": {"message": "bad field", "body": PROMPT}},
    *(PROMPT, "context window", [PROMPT], {"error": None, "message": 7}),
]
"""Errors that contain the text of the request."""


def test_an_overflow_message_of_the_server_and_nothing_else_is_an_overflow() -> None:
    bodies = [json.dumps(body).encode() for body in [*OVERFLOWS, *OTHERS]]
    found = [is_context_overflow(422, body) for body in bodies]
    assert found == [True] * len(OVERFLOWS) + [False] * len(OTHERS)
    assert not any(is_context_overflow(500, body) for body in bodies)
    for body in (b"<h1>What is a context window?</h1>", b"\xff\xfe context window"):
        assert not is_context_overflow(400, body), "it is not JSON"
