"""A tool: a function a policy may call, the schema it is shown, and the check its arguments pass.

Schemas are strict in the sense of OpenAI's function calling: every argument is required, a defaulted one is
nullable and null means the default (https://platform.openai.com/docs/guides/function-calling#strict-mode).
"""

from __future__ import annotations

import inspect
import json
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NotRequired

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config
from pydantic.errors import PydanticUserError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticSerializationError, to_json
from typing_extensions import TypedDict

from gymsdk import errors, jsonl
from gymsdk.errors import format_suggestion
from gymsdk.types import Content, Item

TYPE_KEYWORDS = frozenset({"type", "anyOf", "$ref", "enum", "const"})
"""Keywords one of which says what a value is."""

STRICT_KEYWORDS = TYPE_KEYWORDS | {
    *("description", "properties", "required", "additionalProperties", "items", "minItems", "maxItems"),
    *("pattern", "format", "minLength", "maxLength"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
"""Keywords strict form knows; a provider refuses a schema with any other."""

STRICT_FORMATS = frozenset({None, "date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid"})
"""Formats strict form knows."""


class _NotStrictError(Exception):
    """Strict form has no words for this schema."""


def make_strict(shape: Item) -> Item | None:
    """Give *shape*, the schema of an object, in strict form: what it does not require is nullable instead.

    `None` where strict form cannot express it.
    """
    required = set(shape.get("required", []))
    try:
        closed = {key: _close_schema(node) for key, node in shape.get("properties", {}).items()}
        definitions = {key: _close_schema(node) for key, node in shape.get("$defs", {}).items()}
    except _NotStrictError:
        return None
    offered = {key: node if key in required else _make_nullable(node) for key, node in closed.items()}
    whole = {**shape, "properties": offered, "required": list(offered), "additionalProperties": False}
    return whole | {"$defs": definitions} if definitions else whole


def _close_schema(node: Item) -> Item:
    if (
        not TYPE_KEYWORDS & node.keys()
        or not node.keys() <= STRICT_KEYWORDS
        or node.get("format") not in STRICT_FORMATS
    ):
        raise _NotStrictError
    if node.get("type") == "object":
        return _close_object(node)
    if "$ref" in node:
        # A reference may have no neighbours.
        words = {key: value for key, value in node.items() if key != "$ref"}
        return {**words, "anyOf": [{"$ref": node["$ref"]}]} if words else node
    inner = {"anyOf": [_close_schema(each) for each in node["anyOf"]]} if "anyOf" in node else {}
    return {**node, **inner, **({"items": _close_schema(node["items"])} if "items" in node else {})}


def _close_object(node: Item) -> Item:
    properties = node.get("properties")
    open_ended = properties is None or node.get("additionalProperties", False) is not False
    if properties is None or open_ended or set(properties) != set(node.get("required", [])):
        raise _NotStrictError
    closed = {key: _close_schema(each) for key, each in properties.items()}
    return {**node, "properties": closed, "additionalProperties": False}


def _make_nullable(node: Item) -> Item:
    plain = dict(node)
    branches = plain.pop("anyOf", None)
    if branches is None and isinstance(plain.get("type"), str) and "enum" not in plain and "const" not in plain:
        return {**plain, "type": [plain["type"], "null"]}
    words = {key: plain.pop(key) for key in ("description",) if key in plain}
    branches = branches or [plain]
    if {"type": "null"} not in branches:
        branches = [*branches, {"type": "null"}]
    return {**words, "anyOf": branches}


def remove_titles(node: Any, *, names: bool = False) -> Any:
    """Give *node* without pydantic's titles; *names* says that the keys here are the author's own words."""
    if isinstance(node, list):
        return [remove_titles(each) for each in node]
    if not isinstance(node, dict):
        return node
    inner = {"properties", "$defs"}
    return {
        key: remove_titles(value, names=key in inner and not names)
        for key, value in node.items()
        if names or key != "title"
    }


def get_parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Give the parameters of *function* by name, `self` of a bound method left out."""
    return dict(inspect.signature(function).parameters)


def resolve_annotation(function: Callable[..., Any], parameter: str) -> Any:
    """Give the resolved annotation of one parameter, `None` where there is none.

    Raises `NameError` where it means nothing at run time.
    """
    plain = inspect.unwrap(getattr(function, "__func__", function))
    written = getattr(plain, "__annotations__", {}).get(parameter)
    if written is None:
        return None
    holder = SimpleNamespace(__annotations__={parameter: written})
    try:
        return typing.get_type_hints(holder, getattr(plain, "__globals__", {}), include_extras=True)[parameter]
    except (AttributeError, SyntaxError, TypeError) as error:
        raise NameError(f"{written!r}: {error}") from error


HOST_PARAMETERS = frozenset({"state", "task", "config", "shared"})
"""Parameter names the host fills; a policy never sees them."""


CONTENT_PART_TYPES = frozenset({"input_text", "input_image", "input_file"})
"""The types of content parts a tool may return a list of; any other list is data, and written as JSON."""


class InvalidArguments(ValueError):
    """A policy's arguments do not fit the tool; the message is for the policy."""


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool: its *function*, the *arguments* a policy gives it, what it asks of the host, its *schema*."""

    name: str
    function: Callable[..., Any]
    arguments: TypeAdapter[dict[str, Any]]
    optional: frozenset[str]
    host_parameters: frozenset[str]
    schema: Item

    def parse_arguments(self, text: str) -> dict[str, Any]:
        """Give the arguments written in *text*, validated; raises `WrongArguments`."""
        try:
            given = jsonl.parse_json(text or "{}", strict=True)
        except ValueError as error:
            raise InvalidArguments(f"Invalid tool call arguments: {error}") from None
        if not isinstance(given, dict):
            raise InvalidArguments(f"Invalid tool call arguments: {self.name} takes a JSON object")
        present = {key: value for key, value in given.items() if value is not None or key not in self.optional}
        try:
            return self.arguments.validate_python(present)
        except ValidationError as error:
            raise InvalidArguments(
                f"Invalid tool call arguments for {self.name}: {errors.format_validation_error(error)}"
            ) from None

    def received(self, text: str) -> bytes:
        """Return what the function receives for the arguments in *text*, as JSON: equal for equal calls.

        Values are converted to the types of the parameters, and defaults are filled in.

        Raises:
            WrongArguments: The tool refuses the arguments.
            ValueError: JSON cannot hold what the function receives.
        """
        taken = get_parameters(self.function)
        arguments = {key: taken[key].default for key in sorted(self.optional)} | self.parse_arguments(text)
        return jsonl.dump_canonical_json(self.arguments.dump_python(arguments, mode="json", warnings=False))


def build_tool(function: Callable[..., Any]) -> Tool:
    """Give the tool *function* makes; raises `TypeError` naming a parameter that cannot be offered."""
    name = getattr(function, "__name__", "")
    if not inspect.isroutine(function) or not name.isidentifier():
        raise TypeError(f"tool {function!r} has no name a policy could call; write it as a named function")
    taken = get_parameters(function)
    given = {key: parameter for key, parameter in taken.items() if key not in HOST_PARAMETERS}
    optional = frozenset(key for key, parameter in given.items() if parameter.default is not parameter.empty)
    kinds = {key: _get_parameter_type(name, function, parameter) for key, parameter in given.items()}
    try:
        arguments = _build_adapter(
            name, {key: NotRequired[kinds[key]] if key in optional else kinds[key] for key in kinds}
        )
        schema = _build_schema(name, function, arguments.json_schema())
    except PydanticUserError as error:
        raise TypeError(f"tool {name!r}: {str(error).splitlines()[0]}") from None
    return Tool(name, function, arguments, optional, HOST_PARAMETERS & taken.keys(), schema)


def build_toolbox(functions: Iterable[Callable[..., Any]]) -> dict[str, Tool]:
    """Give the tools *functions* make, by name; raises `TypeError` where one cannot be offered, or two share a name."""
    found: dict[str, Tool] = {}
    for made in map(build_tool, functions):
        if made.name in found:
            raise TypeError(f"two tools are named {made.name!r}")
        found[made.name] = made
    return found


def _build_adapter(name: str, kinds: dict[str, Any]) -> TypeAdapter[dict[str, Any]]:
    fields = TypedDict(name, kinds)  # type: ignore[misc]  # its fields are known at run time only
    adapt: Callable[[Any], TypeAdapter[dict[str, Any]]] = TypeAdapter
    return adapt(with_config(ConfigDict(extra="forbid"))(fields))


def _get_parameter_type(name: str, function: Callable[..., Any], parameter: inspect.Parameter) -> Any:
    if parameter.kind in {parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY}:
        raise TypeError(f"tool {name!r}: parameter {parameter.name!r} has no name a policy could give")
    if isinstance(parameter.default, FieldInfo):
        raise TypeError(
            f"tool {name!r}: parameter {parameter.name!r} has a `Field(...)` for its default; write"
            " `Annotated[..., Field(...)]` for its type, and a plain default"
        )
    try:
        kind = resolve_annotation(function, parameter.name)
    except NameError as error:
        raise TypeError(f"tool {name!r}: the annotation of {parameter.name!r} names nothing: {error}") from None
    if kind is None:
        raise TypeError(f"tool {name!r}: parameter {parameter.name!r} needs a type; it becomes the tool's schema")
    return kind


def _build_schema(name: str, function: Callable[..., Any], shape: Item) -> Item:
    plain = remove_titles(shape)
    strict = make_strict(plain)
    return {
        "type": "function",
        "name": name,
        "description": inspect.getdoc(function) or "",
        "parameters": plain if strict is None else strict,
        "strict": strict is not None,
    }


def serialize_output(value: object) -> Content:
    """Give what a tool returned as the policy reads it: text and content parts as they are, the rest as JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(map(_is_content_part, value)):
        return value
    try:
        return to_json(value).decode()
    except (PydanticSerializationError, ValueError, RecursionError) as error:
        raise TypeError(f"returned something JSON cannot hold: {error}") from None


def _is_content_part(value: object) -> bool:
    return isinstance(value, dict) and str(value.get("type")) in CONTENT_PART_TYPES


def format_error_output(message: str) -> str:
    """Give *message* as the output of a call that was not run."""
    return json.dumps({"error": message}, ensure_ascii=False)


def format_unknown_tool(name: str, offered: Mapping[str, object]) -> str:
    """Give the sentence that answers a call of a tool that is not on offer."""
    listed = ", ".join(offered) or "none"
    near = format_suggestion(name, offered).replace("; did", "Did", 1)
    return " ".join(filter(None, [f"There is no tool named {name!r}.", near, f"Tools on offer: {listed}."]))
