"""Parameters outside the Responses API: they ride in a request's `metadata`, as JSON text."""

from __future__ import annotations

import json
from typing import Any

from gymsdk.errors import Failed
from gymsdk.transcript import Item

BODY = "extra_body"
TEMPLATE = "chat_template_kwargs"


def extras(request: Item) -> Item:
    """Give what the request's metadata adds to the body that a server is sent."""
    metadata = request.get("metadata") or {}
    template = _object(metadata, TEMPLATE)
    return _object(metadata, BODY) | ({TEMPLATE: template} if template else {})


def plain(request: Item) -> Item:
    """Give the request with what its metadata adds written out, and null values left out."""
    metadata = {key: value for key, value in (request.get("metadata") or {}).items() if key not in {BODY, TEMPLATE}}
    kept = {key: value for key, value in request.items() if value is not None and key != "metadata"}
    return extras(request) | kept | ({"metadata": metadata} if metadata else {})


def _object(metadata: Item, key: str) -> Item:
    value = metadata.get(key) or {}
    parsed = _parsed(value, key) if isinstance(value, str) else value
    if isinstance(parsed, dict):
        return parsed
    raise Failed(f"metadata.{key} must be a JSON object", kind="model_bad_request")


def _parsed(text: str, key: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise Failed(f"metadata.{key} is not JSON: {error}", kind="model_bad_request") from error
