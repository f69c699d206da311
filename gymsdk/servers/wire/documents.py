"""Documents: what a server's OpenAPI document says of an endpoint that reads its body itself."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypedDict

from pydantic.errors import PydanticUserError

from gymsdk.transcript import Item
from gymsdk.types import Task

ANSWERS = {
    408: "The body did not come in time.",
    409: "The session is not there, or in no state for this.",
    413: "The body is too large.",
    422: "The body does not fit; or the environment broke on it for good.",
    503: "It may go well another time: `retry-after` says when.",
}


ITEM: Item = {
    "type": "object",
    "properties": {
        "type": {"enum": ["message", "function_call", "function_call_output", "reasoning"]},
        "role": {"enum": ["user", "assistant", "system", "developer"]},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]},
        "name": {"type": "string"},
        "arguments": {"type": "string"},
        "call_id": {"type": "string"},
        "output": {"type": "string"},
    },
}

PROMPT: Item = {
    "type": "object",
    "required": ["input"],
    "properties": {"input": {"anyOf": [{"type": "string"}, {"type": "array", "items": ITEM}]}},
}

MESSAGE: Item = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"enum": ["user", "assistant", "system", "tool"]},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]},
    },
}

CREATE: Item = {**PROMPT, "properties": {**PROMPT["properties"], "stream": {"type": "boolean"}}}
"""A Responses request."""

CHAT: Item = {
    "type": "object",
    "required": ["messages"],
    "properties": {"messages": {"type": "array", "items": MESSAGE}, "stream": {"type": "boolean"}},
}
"""A request of Chat Completions, or of Anthropic's Messages."""

RESPONSE: Item = {
    "type": "object",
    "required": ["output"],
    "properties": {"output": {"type": "array", "items": ITEM}},
}


FLAT: Item = {"type": "object", "required": ["responses_create_params"]}
"""A row of an environment whose own fields are not looked at."""

VERIFIED: Item = {
    "type": "object",
    "properties": {"verify_responses": {"type": "array", "items": {"type": "object"}}},
}


STREAMED: Item = {
    "description": "The answer, or a stream of server-sent events where the body asks for one.",
    "content": {"text/event-stream": {"schema": {"type": "string"}}},
}
"""An answer that may be streamed."""


class Documented(TypedDict):
    """What `FastAPI.add_api_route` is told of an endpoint."""

    openapi_extra: dict[str, Any]
    responses: dict[int | str, dict[str, Any]]


def documented(shape: Item, *, required: bool = True, more: Mapping[int, str] = MappingProxyType({})) -> Documented:
    """Give the documentation of an endpoint whose body has this *shape*, a JSON schema; *more* it answers with."""
    content = {"application/json": {"schema": _inlined(shape, shape.get("$defs", {}))}}
    return {
        "openapi_extra": {"requestBody": {"required": required, "content": content}},
        "responses": {status: {"description": words} for status, words in {**ANSWERS, **more}.items()},
    }


def row_of(task: type[Task], **more: Item) -> Item:
    """Give the shape of a row of *task*, with whatever *more* it must hold."""
    try:
        shape = task.model_json_schema()
    except PydanticUserError:
        # An author's own type may have no schema; what it takes is found out by its validator alone.
        shape = {"type": "object"}
    fields = {**shape.get("properties", {}), "responses_create_params": PROMPT, **more}
    required = [*{"responses_create_params": None, **dict.fromkeys(shape.get("required", ())), **more}]
    return {**shape, "properties": fields, "required": required}


def _inlined(shape: Any, named: Item) -> Any:
    """Give *shape* with what it refers to in its place: a reference would look for it in the whole document."""
    if isinstance(shape, list):
        return [_inlined(each, named) for each in shape]
    if not isinstance(shape, dict):
        return shape
    if "$ref" in shape and (name := str(shape["$ref"]).removeprefix("#/$defs/")) in named:
        # A shape that holds itself is open from there on.
        rest = {other: each for other, each in named.items() if other != name}
        return _inlined(named[name], rest)
    if "$ref" in shape:
        return {}
    return {key: _inlined(each, named) for key, each in shape.items() if key != "$defs"}
