"""OpenAPI documentation of endpoints that parse their bodies themselves."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypedDict

from pydantic.errors import PydanticUserError

from gymsdk.types import Item, Task

ERROR_DESCRIPTIONS = {
    408: "The body did not arrive in time.",
    409: "The session does not exist, or its state does not allow the request.",
    413: "The body is too large.",
    422: "The body is invalid, or the environment fails on it permanently.",
    503: "A temporary failure: send the request again after `retry-after` seconds.",
}
"""Descriptions of the error statuses that every endpoint can return."""


ITEM_SCHEMA: Item = {
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


PROMPT_SCHEMA: Item = {
    "type": "object",
    "required": ["input"],
    "properties": {"input": {"anyOf": [{"type": "string"}, {"type": "array", "items": ITEM_SCHEMA}]}},
}


MESSAGE_SCHEMA: Item = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"enum": ["user", "assistant", "system", "tool"]},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]},
    },
}


RESPONSES_REQUEST_SCHEMA: Item = {
    **PROMPT_SCHEMA,
    "properties": {**PROMPT_SCHEMA["properties"], "stream": {"type": "boolean"}},
}
"""Body of a Responses API request."""


CHAT_REQUEST_SCHEMA: Item = {
    "type": "object",
    "required": ["messages"],
    "properties": {"messages": {"type": "array", "items": MESSAGE_SCHEMA}, "stream": {"type": "boolean"}},
}
"""Body of a Chat Completions request or an Anthropic Messages request."""


COMPLETION_REQUEST_SCHEMA: Item = {
    "type": "object",
    "required": ["prompt"],
    "properties": {
        "prompt": {"anyOf": [{"type": "string"}, {"type": "array"}]},
        "n": {"type": "integer"},
        "stream": {"type": "boolean"},
    },
}
"""Body of a Completions request."""


RESPONSE_SCHEMA: Item = {
    "type": "object",
    "required": ["output"],
    "properties": {"output": {"type": "array", "items": ITEM_SCHEMA}},
}


FLAT_ROW_SCHEMA: Item = {"type": "object", "required": ["responses_create_params"]}
"""A row without a description of the environment's fields."""


AGGREGATE_SCHEMA: Item = {
    "type": "object",
    "properties": {"verify_responses": {"type": "array", "items": {"type": "object"}}},
}


STREAM_RESPONSE: Item = {
    "description": "The response, or a stream of server-sent events if the body asks for a stream.",
    "content": {"text/event-stream": {"schema": {"type": "string"}}},
}
"""A response that may be streamed."""


class EndpointDocs(TypedDict):
    """The keyword arguments of `FastAPI.add_api_route` that document an endpoint."""

    openapi_extra: dict[str, Any]
    responses: dict[int | str, dict[str, Any]]


def document_endpoint(
    schema: Item, *, required: bool = True, more: Mapping[int, str] = MappingProxyType({})
) -> EndpointDocs:
    """Return the OpenAPI arguments for an endpoint that parses its body itself.

    Args:
        schema: The JSON schema of the body.
        required: Whether the body is required.
        more: Descriptions of further response statuses.
    """
    content = {"application/json": {"schema": _inline_references(schema, schema.get("$defs", {}))}}
    return {
        "openapi_extra": {"requestBody": {"required": required, "content": content}},
        "responses": {status: {"description": words} for status, words in {**ERROR_DESCRIPTIONS, **more}.items()},
    }


def build_row_schema(task: type[Task], **more: Item) -> Item:
    """Build the JSON schema of a row of `task`; `more` are further required fields."""
    try:
        schema = task.model_json_schema()
    except PydanticUserError:
        # A custom type of the environment may have no JSON schema; only its validator knows it.
        schema = {"type": "object"}
    fields = {**schema.get("properties", {}), "responses_create_params": PROMPT_SCHEMA, **more}
    required = [*{"responses_create_params": None, **dict.fromkeys(schema.get("required", ())), **more}]
    return {**schema, "properties": fields, "required": required}


def _inline_references(schema: Any, definitions: Item) -> Any:
    """Replace each `$ref` by its definition: FastAPI resolves references only against the whole document."""
    if isinstance(schema, list):
        return [_inline_references(value, definitions) for value in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema and (name := str(schema["$ref"]).removeprefix("#/$defs/")) in definitions:
        # A recursive schema stays open at the second level.
        rest = {key: value for key, value in definitions.items() if key != name}
        return _inline_references(definitions[name], rest)
    if "$ref" in schema:
        return {}
    return {key: _inline_references(value, definitions) for key, value in schema.items() if key != "$defs"}
