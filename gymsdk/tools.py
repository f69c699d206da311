"""A tool: a function a policy may call, the schema it is shown, and the check its arguments pass.

Schemas are strict in the sense of OpenAI's function calling: every argument is required, a defaulted one is
nullable and null means the default (https://platform.openai.com/docs/guides/function-calling#strict-mode).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NotRequired

import orjson
from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config
from pydantic.errors import PydanticUserError
from pydantic_core import PydanticSerializationError, to_json
from typing_extensions import TypedDict

from gymsdk.annotations import annotation, parameters
from gymsdk.errors import suggestion
from gymsdk.types import Content, Item

GIVEN = frozenset({"state", "task", "config", "shared"})
"""Parameter names the host fills; a policy never sees them."""


class WrongArguments(ValueError):
    """A policy's arguments do not fit the tool; the message is for the policy."""


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool: its *function*, the *arguments* a policy gives it, what it asks of the host, its *schema*."""

    name: str
    function: Callable[..., Any]
    arguments: TypeAdapter[dict[str, Any]]
    optional: frozenset[str]
    asks: frozenset[str]
    schema: Item

    def read(self, text: str) -> dict[str, Any]:
        """Give the arguments written in *text*, validated; raises `WrongArguments`."""
        try:
            given = orjson.loads(text or "{}")
        except orjson.JSONDecodeError as error:
            raise WrongArguments(f"Invalid tool call arguments: {error}") from None
        if not isinstance(given, dict):
            raise WrongArguments(f"Invalid tool call arguments: {self.name} takes a JSON object")
        present = {key: value for key, value in given.items() if value is not None or key not in self.optional}
        try:
            return self.arguments.validate_python(present)
        except ValidationError as error:
            raise WrongArguments(f"Invalid tool call arguments for {self.name}: {_sentence(error)}") from None


def _sentence(error: ValidationError) -> str:
    return "; ".join(f"{'.'.join(map(str, each['loc'])) or 'value'}: {each['msg']}" for each in error.errors())


def tool(function: Callable[..., Any]) -> Tool:
    """Give the tool *function* makes; raises `TypeError` naming a parameter that cannot be offered."""
    name = getattr(function, "__name__", "")
    if not name.isidentifier():
        raise TypeError(f"{function!r} has no name a policy could call; write it as a named function")
    taken = parameters(function)
    given = {key: parameter for key, parameter in taken.items() if key not in GIVEN}
    optional = frozenset(key for key, parameter in given.items() if parameter.default is not parameter.empty)
    kinds = {key: _kind(name, function, parameter) for key, parameter in given.items()}
    arguments = _adapter(name, {key: NotRequired[kind] if key in optional else kind for key, kind in kinds.items()})
    schema = _schema(name, function, arguments.json_schema())
    return Tool(name, function, arguments, optional, GIVEN & taken.keys(), schema)


def _adapter(name: str, kinds: dict[str, Any]) -> TypeAdapter[dict[str, Any]]:
    fields = TypedDict(name, kinds)  # type: ignore[misc]  # its fields are known at run time only
    adapt: Callable[[Any], TypeAdapter[dict[str, Any]]] = TypeAdapter
    try:
        return adapt(with_config(ConfigDict(extra="forbid"))(fields))
    except PydanticUserError as error:
        raise TypeError(f"tool {name!r}: {str(error).splitlines()[0]}") from None


def _kind(name: str, function: Callable[..., Any], parameter: inspect.Parameter) -> Any:
    if parameter.kind in {parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY}:
        raise TypeError(f"tool {name!r}: parameter {parameter.name!r} has no name a policy could give")
    try:
        kind = annotation(function, parameter.name)
    except NameError as error:
        raise TypeError(f"tool {name!r}: the annotation of {parameter.name!r} names nothing: {error}") from None
    if kind is None:
        raise TypeError(f"tool {name!r}: parameter {parameter.name!r} needs a type; it becomes the tool's schema")
    return kind


def _schema(name: str, function: Callable[..., Any], shape: Item) -> Item:
    plain = _untitled(shape)
    strict = _strict(plain)
    return {
        "type": "function",
        "name": name,
        "description": inspect.getdoc(function) or "",
        "parameters": plain if strict is None else strict,
        "strict": strict is not None,
    }


def _untitled(node: Any, *, names: bool = False) -> Any:
    """Leave out pydantic's titles; *names* says that the keys here are the author's own words."""
    if isinstance(node, list):
        return [_untitled(each) for each in node]
    if not isinstance(node, dict):
        return node
    inner = {"properties", "$defs"}
    return {
        key: _untitled(value, names=key in inner and not names)
        for key, value in node.items()
        if names or key != "title"
    }


def _strict(shape: Item) -> Item | None:
    properties = shape.get("properties", {})
    required = set(shape.get("required", []))
    if not all(map(_closed, shape.get("$defs", {}).values())) or not all(map(_closed, properties.values())):
        return None
    offered = {key: value if key in required else _nullable(value) for key, value in properties.items()}
    return {**shape, "properties": offered, "required": list(offered), "additionalProperties": False}


def _closed(node: Item) -> bool:
    """Whether strict mode can express *node*: every object lists its keys and requires them all."""
    if node.get("type") == "object":
        properties = node.get("properties")
        if properties is None or node.get("additionalProperties") is not False:
            return False
        return set(properties) == set(node.get("required", [])) and all(map(_closed, properties.values()))
    inner = [*node.get("anyOf", []), *([node["items"]] if "items" in node else [])]
    known = {"type", "anyOf", "$ref", "enum", "const"} & node.keys()
    return bool(known) and "prefixItems" not in node and "oneOf" not in node and all(map(_closed, inner))


def _nullable(node: Item) -> Item:
    plain = {key: value for key, value in node.items() if key != "default"}
    branches = plain.pop("anyOf", None)
    if branches is None and isinstance(plain.get("type"), str) and "enum" not in plain:
        return {**plain, "type": [plain["type"], "null"]}
    words = {key: plain.pop(key) for key in ("description",) if key in plain}
    branches = branches or [plain]
    if {"type": "null"} not in branches:
        branches = [*branches, {"type": "null"}]
    return {**words, "anyOf": branches}


def written(value: object) -> Content:
    """Give what a tool returned as the policy reads it: text and content parts as they are, the rest as JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(part, dict) and "type" in part for part in value):
        return value
    try:
        return to_json(value).decode()
    except PydanticSerializationError as error:
        raise TypeError(f"it returned something JSON cannot hold: {error}") from None


def refusal(message: str) -> str:
    """Give *message* as the output of a call that was not run."""
    return orjson.dumps({"error": message}).decode()


def unknown(name: str, offered: Mapping[str, object]) -> str:
    """Give the sentence that answers a call of a tool that is not on offer."""
    listed = ", ".join(offered) or "none"
    return refusal(f"There is no tool named {name!r}{suggestion(name, offered) or '.'} Tools on offer: {listed}.")
