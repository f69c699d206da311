"""A body with arbitrary JSON is accepted, or rejected with an error message."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any, TypeAlias

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gymsdk.convert import chat, responses
from gymsdk.convert.api import InvalidRequest
from gymsdk.convert.apis import INBOUND_APIS
from gymsdk.convert.responses import ReasoningFilter
from gymsdk.errors import Failed
from gymsdk.types import Item

from .test_chat_inbound import BODY as CHAT_BODY

Position: TypeAlias = tuple[str | int, ...]

SCHEMA = {"type": "object", "properties": {}}
SAMPLING = {"model": "m", "temperature": 1, "top_p": 1, "stream": True, "metadata": {"user_id": "u"}, "top_k": 3}
BODIES: dict[str, Item] = {
    "chat/completions": {
        **CHAT_BODY,
        **SAMPLING,
        "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": CHAT_BODY["tools"]}},
        "stream_options": {"include_usage": True},
        "max_tokens": 9,
        "logprobs": True,
        "top_logprobs": 2,
        "stop": ["x"],
    },
    "responses": {
        **SAMPLING,
        "instructions": "Be brief.",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
            {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "3"},
        ],
        "tools": [{"type": "function", "name": "add", "parameters": SCHEMA, "strict": True}],
        "tool_choice": {"type": "function", "name": "add"},
        "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}, "verbosity": "low"},
        "reasoning": {"effort": "low"},
        "include": ["message.output_text.logprobs"],
        "max_output_tokens": 9,
        "background": False,
    },
    "messages": {
        **SAMPLING,
        "max_tokens": 9,
        "system": [{"type": "text", "text": "Be brief."}],
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "a"},
                    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}},
                    {"type": "document", "source": {"type": "content", "content": "D"}, "title": "T"},
                ],
            },
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": '{"id":"rs_1","summary":[]}'},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "b"},
                    {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}, "arguments": '{"a":1}'},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "3"}]},
        ],
        "tools": [{"name": "add", "description": "Adds.", "input_schema": SCHEMA}],
        "tool_choice": {"type": "tool", "name": "add", "disable_parallel_tool_use": True},
        "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}},
        "output_format": {"type": "json_schema", "schema": SCHEMA},
        "thinking": {"type": "enabled", "budget_tokens": 9},
        "stop_sequences": ["x"],
        "mcp_servers": [],
    },
}

words = st.sampled_from(["", "a", "type", "text", "function", "id", "{", "[]", "tool", "assistant", "allowed_tools"])
leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | words
values = st.recursive(leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3))


def positions(value: Any, here: Position = ()) -> Iterator[Position]:
    """Yield the position of each element in *value*."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, element in inner:
        yield (*here, key)
        yield from positions(element, (*here, key))


def replace_value(body: Item, position: Position, value: Any) -> Item:
    """Return a copy of *body* with *value* at *position*."""
    copied: Any = copy.deepcopy(body)
    at = copied
    for key in position[:-1]:
        at = at[key]
    at[position[-1]] = value
    return copied  # type: ignore[no-any-return]  # JSON


def parse_error(path: str, body: Item) -> str:
    """Return the error message for *body*, or an empty string if *body* is valid."""
    try:
        INBOUND_APIS[path].parse_request(body)
    except InvalidRequest as error:
        return str(error)
    return ""


def is_sendable(request: Item) -> bool:
    """Return True if each outbound API serializes *request* or rejects it as a bad request."""
    for body in (chat.build_body, responses.build_body, ReasoningFilter().build_body):
        try:
            json.dumps(body(request))
        except Failed as error:
            assert error.kind == "model_bad_request"  # noqa: PT017  # both outcomes are correct
    return True


@pytest.mark.parametrize("path", INBOUND_APIS)
def test_a_valid_body_is_parsed(path: str) -> None:
    assert INBOUND_APIS[path].parse_request(BODIES[path])["input"]


@pytest.mark.slow
@pytest.mark.parametrize("path", INBOUND_APIS)
@settings(max_examples=400, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(data=st.data())
def test_a_body_with_a_random_value_is_parsed_or_rejected(path: str, data: st.DataObject) -> None:
    position = data.draw(st.sampled_from([*positions(BODIES[path])]))
    body = replace_value(BODIES[path], position, data.draw(values))
    assert parse_error(path, body) or is_sendable(INBOUND_APIS[path].parse_request(body))


HOSTILE = (None, 0, -1, 1.5, "", "a", True, [], [[]], [{}], ["a"], [None], {}, {"a": []}, {"type": []}, {"type": {}})


@pytest.mark.slow
@pytest.mark.parametrize("path", INBOUND_APIS)
def test_each_position_accepts_or_rejects_each_type_of_value(path: str) -> None:
    for position in positions(BODIES[path]):
        for value in HOSTILE:
            body = replace_value(BODIES[path], position, value)
            assert parse_error(path, body) or is_sendable(INBOUND_APIS[path].parse_request(body)), (position, value)
