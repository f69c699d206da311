"""JSON schemas as strict function calling takes them: every object closed, every property required.

What strict form can express: https://platform.openai.com/docs/guides/structured-outputs#supported-schemas
"""

from __future__ import annotations

from typing import Any

from gymsdk.transcript import Item

KINDS = frozenset({"type", "anyOf", "$ref", "enum", "const"})
"""Keywords one of which says what a value is."""

KEYWORDS = KINDS | {
    *("description", "properties", "required", "additionalProperties", "items", "minItems", "maxItems"),
    *("pattern", "format", "minLength", "maxLength"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
"""Keywords strict form knows; a provider refuses a schema with any other."""

FORMATS = frozenset({None, "date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid"})
"""Formats strict form knows."""


class _Inexpressible(Exception):
    """Strict form has no words for this schema."""


def strict(shape: Item) -> Item | None:
    """Give *shape*, the schema of an object, in strict form: what it does not require is nullable instead.

    `None` where strict form cannot express it.
    """
    required = set(shape.get("required", []))
    try:
        closed = {key: _closed(node) for key, node in shape.get("properties", {}).items()}
        definitions = {key: _closed(node) for key, node in shape.get("$defs", {}).items()}
    except _Inexpressible:
        return None
    offered = {key: node if key in required else _nullable(node) for key, node in closed.items()}
    whole = {**shape, "properties": offered, "required": list(offered), "additionalProperties": False}
    return whole | {"$defs": definitions} if definitions else whole


def _closed(node: Item) -> Item:
    if not KINDS & node.keys() or not node.keys() <= KEYWORDS or node.get("format") not in FORMATS:
        raise _Inexpressible
    if node.get("type") == "object":
        return _closed_object(node)
    if "$ref" in node:
        # A reference may have no neighbours.
        words = {key: value for key, value in node.items() if key != "$ref"}
        return {**words, "anyOf": [{"$ref": node["$ref"]}]} if words else node
    inner = {"anyOf": [_closed(each) for each in node["anyOf"]]} if "anyOf" in node else {}
    return {**node, **inner, **({"items": _closed(node["items"])} if "items" in node else {})}


def _closed_object(node: Item) -> Item:
    properties = node.get("properties")
    open_ended = properties is None or node.get("additionalProperties", False) is not False
    if properties is None or open_ended or set(properties) != set(node.get("required", [])):
        raise _Inexpressible
    closed = {key: _closed(each) for key, each in properties.items()}
    return {**node, "properties": closed, "additionalProperties": False}


def _nullable(node: Item) -> Item:
    plain = dict(node)
    branches = plain.pop("anyOf", None)
    if branches is None and isinstance(plain.get("type"), str) and "enum" not in plain and "const" not in plain:
        return {**plain, "type": [plain["type"], "null"]}
    words = {key: plain.pop(key) for key in ("description",) if key in plain}
    branches = branches or [plain]
    if {"type": "null"} not in branches:
        branches = [*branches, {"type": "null"}]
    return {**words, "anyOf": branches}


def untitled(node: Any, *, names: bool = False) -> Any:
    """Give *node* without pydantic's titles; *names* says that the keys here are the author's own words."""
    if isinstance(node, list):
        return [untitled(each) for each in node]
    if not isinstance(node, dict):
        return node
    inner = {"properties", "$defs"}
    return {
        key: untitled(value, names=key in inner and not names) for key, value in node.items() if names or key != "title"
    }
