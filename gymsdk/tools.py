"""Tools: build a tool and its strict JSON schema from a function, validate arguments, and truncate outputs.

Schemas are strict in the sense of OpenAI's function calling: every argument is required, and an argument with a default
is nullable, where null stands for the default
(https://platform.openai.com/docs/guides/function-calling#strict-mode).
"""

from __future__ import annotations

import inspect
import json
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace, UnionType
from typing import Annotated, Any, NewType, NotRequired, TypeGuard, TypeVar, Union, get_args, get_origin

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config
from pydantic.errors import PydanticUserError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticSerializationError, to_json
from typing_extensions import TypeAliasType, TypedDict

from gymsdk.errors import GymsdkError, format_suggestion, format_validation_error
from gymsdk.finite import find_non_finite
from gymsdk.jsonl import dump_canonical_json, parse_json
from gymsdk.types import MAX_OUTPUT_CHARS, Config, Content, Item, State, Task, is_object_list

HOST_TYPES: Mapping[str, type] = {"state": State, "task": Task, "config": Config}
"""The types of the values with which the host fills parameters of these names."""

HOST_PARAMETERS = frozenset({*HOST_TYPES, "shared"})
"""The names of parameters that the host fills; they are not part of a tool's schema."""

CONTENT_PART_TYPES = frozenset({"input_text", "input_image", "input_file"})
"""The types of content parts that a tool may return in a list; any other list is data and written as JSON."""

TYPE_KEYWORDS = frozenset({"type", "anyOf", "$ref", "enum", "const"})
"""JSON Schema keywords that state the type of a value; a strict schema needs one of them."""

STRICT_KEYWORDS = TYPE_KEYWORDS | {
    *("description", "properties", "required", "additionalProperties", "items", "minItems", "maxItems"),
    *("pattern", "format", "minLength", "maxLength"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
"""The keywords of strict schemas (https://platform.openai.com/docs/guides/structured-outputs#supported-schemas).

Providers reject a strict schema with any other keyword.
"""

STRICT_FORMATS = frozenset({None, "date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid"})
"""The values of `format` in strict schemas."""

SURROGATE_MESSAGE = (
    "Invalid tool call arguments: they contain an unpaired surrogate, such as \\ud800, which is no character."
)
"""The output of a call with arguments that UTF-8 cannot express."""

TRUNCATION_NOTE = "\n[truncated: this output has {size} characters; at most {max_chars} are shown]"
OMITTED_PART_NOTE = "[omitted: {kind} of {size} characters; at most {max_chars} characters of one output are shown]"


class NothingShared:
    """Stands for the type of `shared` in an environment without a `lifespan`; no annotation but a general one fits."""


class InvalidArguments(GymsdkError, ValueError):
    """A policy's arguments do not fit the tool; the message is shown to the policy."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a policy may call.

    Attributes:
        name: The tool's name.
        function: The function.
        arguments: Validates the arguments that a policy gives.
        optional: The names of the arguments with defaults.
        host_parameters: The parameters that the host fills.
        schema: The tool's schema in the form of the Responses API.
    """

    name: str
    function: Callable[..., Any]
    arguments: TypeAdapter[dict[str, Any]]
    optional: frozenset[str]
    host_parameters: frozenset[str]
    schema: Item

    def parse_arguments(self, text: str) -> dict[str, Any]:
        """Return the validated arguments in the JSON *text*.

        Raises:
            InvalidArguments: The arguments do not fit the tool.
        """
        try:
            value = parse_json(text or "{}", strict=True)
        except ValueError as error:
            raise InvalidArguments(f"Invalid tool call arguments: {error}") from None
        if not isinstance(value, dict):
            raise InvalidArguments(f"Invalid tool call arguments: {self.name} takes a JSON object")
        present = {key: argument for key, argument in value.items() if argument is not None or key not in self.optional}
        try:
            validated = self.arguments.validate_python(present)
        except ValidationError as error:
            reason = format_validation_error(error)
            raise InvalidArguments(f"Invalid tool call arguments for {self.name}: {reason}") from None
        if path := find_non_finite(present, validated):
            reason = f"{path}: Input should be a finite number"
            raise InvalidArguments(f"Invalid tool call arguments for {self.name}: {reason}")
        return validated

    def received(self, text: str) -> bytes:
        """Return the arguments that the function receives for *text*, as JSON that is equal for equal calls.

        Values are converted to the types of the parameters, and defaults are filled in.

        Raises:
            InvalidArguments: The arguments do not fit the tool.
            ValueError: JSON does not support an argument.
        """
        parameters = get_parameters(self.function)
        defaults = {key: parameters[key].default for key in sorted(self.optional)}
        arguments = defaults | self.parse_arguments(text)
        return dump_canonical_json(self.arguments.dump_python(arguments, mode="json", warnings=False))


def build_tool(function: Callable[..., Any], shared_type: type = object) -> Tool:
    """Return the tool for *function*.

    Args:
        function: A named function with annotated parameters. Its docstring becomes the description.
        shared_type: The type of the value with which the host fills the parameter `shared`.

    Raises:
        TypeError: The function or one of its parameters cannot be offered.
    """
    name = getattr(function, "__name__", "")
    if not inspect.isroutine(function) or not name.isidentifier():
        raise TypeError(f"tool {function!r} has no name that a policy could call; write it as a named function")
    all_parameters = get_parameters(function)
    parameters = {key: parameter for key, parameter in all_parameters.items() if key not in HOST_PARAMETERS}
    for key in HOST_PARAMETERS & all_parameters.keys():
        _check_host_parameter(name, function, key, HOST_TYPES.get(key, shared_type))
    optional = frozenset(key for key, parameter in parameters.items() if parameter.default is not parameter.empty)
    types = {key: _get_parameter_type(name, function, parameter) for key, parameter in parameters.items()}
    try:
        arguments = _build_adapter(
            name, {key: NotRequired[types[key]] if key in optional else types[key] for key in types}
        )
        schema = _build_schema(name, function, arguments.json_schema())
    except PydanticUserError as error:
        raise TypeError(f"tool {name!r}: {str(error).splitlines()[0]}") from None
    return Tool(name, function, arguments, optional, HOST_PARAMETERS & all_parameters.keys(), schema)


def build_toolbox(functions: Iterable[Callable[..., Any]], shared_type: type = object) -> dict[str, Tool]:
    """Return the tools for *functions* by name; raises `TypeError` if one cannot be offered or two share a name.

    Args:
        functions: The functions.
        shared_type: The type of the value with which the host fills the parameter `shared`.
    """
    toolbox: dict[str, Tool] = {}
    for tool in (build_tool(function, shared_type) for function in functions):
        if tool.name in toolbox:
            raise TypeError(f"two tools are named {tool.name!r}")
        toolbox[tool.name] = tool
    return toolbox


def serialize_output(value: object) -> Content:
    """Return the result of a tool as a policy reads it: text and content parts unchanged, other values as JSON.

    Raises:
        TypeError: JSON does not support the value.
    """
    if isinstance(value, str):
        return value
    if is_content_list(value):
        return value
    try:
        return to_json(value).decode()
    except (PydanticSerializationError, ValueError, RecursionError) as error:
        raise TypeError(f"returned a value that JSON does not support: {error}") from None


def format_error_output(message: str) -> str:
    """Return *message* as the output of a call that was not run."""
    return json.dumps({"error": message}, ensure_ascii=False)


def format_unknown_tool(name: str, offered: Mapping[str, object]) -> str:
    """Return the message for a call of a tool that is not in *offered*."""
    listed = ", ".join(offered) or "none"
    suggestion = format_suggestion(name, offered).replace("; did", "Did", 1)
    return " ".join(filter(None, [f"There is no tool named {name!r}.", suggestion, f"Available tools: {listed}."]))


# Signatures


def get_parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the parameters of *function* by name, without `self` of a bound method."""
    return dict(inspect.signature(function).parameters)


def resolve_annotation(function: Callable[..., Any], parameter: str) -> Any:
    """Return the annotation of one parameter, `None` if it has none.

    Only this annotation is resolved, so that errors in the others do not matter.

    Raises:
        NameError: The annotation cannot be resolved at run time.
    """
    plain = inspect.unwrap(getattr(function, "__func__", function))
    annotation = getattr(plain, "__annotations__", {}).get(parameter)
    if annotation is None:
        return None
    holder = SimpleNamespace(__annotations__={parameter: annotation})
    try:
        return typing.get_type_hints(holder, getattr(plain, "__globals__", {}), include_extras=True)[parameter]
    except (AttributeError, SyntaxError, TypeError) as error:
        raise NameError(f"{annotation!r}: {error}") from error


def _check_host_parameter(name: str, function: Callable[..., Any], parameter: str, host_type: type) -> None:
    """Raise `TypeError` if the author's annotation shows that a policy should give a parameter that the host fills."""
    try:
        annotation = resolve_annotation(function, parameter)
    except NameError:
        # Nothing else needs the annotation, which may exist for type checkers only.
        return
    if annotation is not None and not _can_hold(annotation, host_type) and _is_json_type(annotation):
        raise TypeError(
            f"tool {name!r}: a policy cannot give the parameter {parameter!r} of type"
            f" {inspect.formatannotation(annotation)}, because gymsdk fills the parameters"
            f" {', '.join(sorted(HOST_PARAMETERS))}; rename it"
        )


def _can_hold(annotation: Any, host_type: type) -> bool:
    """Return whether a value of *host_type* or of a subclass may have the type *annotation*."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _can_hold(get_args(annotation)[0], host_type)
    if origin in {Union, UnionType}:
        return any(_can_hold(member, host_type) for member in get_args(annotation))
    if isinstance(annotation, NewType):
        return _can_hold(annotation.__supertype__, host_type)
    if isinstance(annotation, TypeAliasType):
        return _can_hold(annotation.__value__, host_type)
    found = origin or annotation
    if found is Any or isinstance(found, TypeVar):
        return True
    # By inheritance alone: with `issubclass`, a model is an `Iterable`.
    return isinstance(found, type) and (found in host_type.__mro__ or host_type in found.__mro__)


def _is_json_type(annotation: Any) -> bool:
    """Return whether *annotation* has a JSON schema, so that a policy may give its values."""
    try:
        TypeAdapter(annotation).json_schema()
    except (PydanticUserError, NameError):
        return False
    return True


def _get_parameter_type(name: str, function: Callable[..., Any], parameter: inspect.Parameter) -> Any:
    if parameter.kind in {parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY}:
        raise TypeError(f"tool {name!r}: parameter {parameter.name!r} cannot be passed by name")
    if isinstance(parameter.default, FieldInfo):
        raise TypeError(
            f"tool {name!r}: parameter {parameter.name!r} has a `Field(...)` as its default; write"
            " `Annotated[..., Field(...)]` as its type, and a plain default"
        )
    try:
        kind = resolve_annotation(function, parameter.name)
    except NameError as error:
        raise TypeError(f"tool {name!r}: the annotation of {parameter.name!r} cannot be resolved: {error}") from None
    if kind is None:
        raise TypeError(f"tool {name!r}: parameter {parameter.name!r} needs a type; it becomes the tool's schema")
    return kind


def _build_adapter(name: str, types: dict[str, Any]) -> TypeAdapter[dict[str, Any]]:
    fields = TypedDict(name, types)  # type: ignore[misc]  # its fields are known only at run time
    adapt: Callable[[Any], TypeAdapter[dict[str, Any]]] = TypeAdapter
    return adapt(with_config(ConfigDict(extra="forbid"))(fields))


def is_content_list(value: object) -> TypeGuard[list[Item]]:
    """Return whether *value* is a list of content parts; an empty list is data."""
    return is_object_list(value) and bool(value) and all(str(part.get("type")) in CONTENT_PART_TYPES for part in value)


# Schemas


def make_strict(schema: Item) -> Item | None:
    """Return the *schema* of an object as a strict schema, in which optional properties are nullable.

    Returns:
        The strict schema, or `None` if a strict schema cannot express it.
    """
    required = set(schema.get("required", []))
    try:
        closed = {key: _close_schema(node) for key, node in schema.get("properties", {}).items()}
        definitions = {key: _close_schema(node) for key, node in schema.get("$defs", {}).items()}
    except _NotStrictError:
        return None
    properties = {key: node if key in required else _make_nullable(node) for key, node in closed.items()}
    strict = {**schema, "properties": properties, "required": list(properties), "additionalProperties": False}
    return strict | {"$defs": definitions} if definitions else strict


def remove_titles(node: Any, *, has_names: bool = False) -> Any:
    """Return the schema *node* without the titles that pydantic adds.

    Args:
        node: The schema, or a part of it.
        has_names: Whether the keys of *node* are names of properties or definitions instead of keywords.
    """
    if isinstance(node, list):
        return [remove_titles(member) for member in node]
    if not isinstance(node, dict):
        return node
    return {
        key: remove_titles(value, has_names=key in {"properties", "$defs"} and not has_names)
        for key, value in node.items()
        if has_names or key != "title"
    }


class _NotStrictError(Exception):
    """A strict schema cannot express this schema."""


def _build_schema(name: str, function: Callable[..., Any], arguments: Item) -> Item:
    plain = remove_titles(arguments)
    strict = make_strict(plain)
    return {
        "type": "function",
        "name": name,
        "description": inspect.getdoc(function) or "",
        "parameters": plain if strict is None else strict,
        "strict": strict is not None,
    }


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
        # In a strict schema, $ref cannot have sibling keywords.
        siblings = {key: value for key, value in node.items() if key != "$ref"}
        return {**siblings, "anyOf": [{"$ref": node["$ref"]}]} if siblings else node
    branches = {"anyOf": [_close_schema(branch) for branch in node["anyOf"]]} if "anyOf" in node else {}
    return {**node, **branches, **({"items": _close_schema(node["items"])} if "items" in node else {})}


def _close_object(node: Item) -> Item:
    properties = node.get("properties")
    is_open = properties is None or node.get("additionalProperties", False) is not False
    if properties is None or is_open or set(properties) != set(node.get("required", [])):
        raise _NotStrictError
    closed = {key: _close_schema(schema) for key, schema in properties.items()}
    return {**node, "properties": closed, "additionalProperties": False}


def _make_nullable(node: Item) -> Item:
    plain = dict(node)
    branches = plain.pop("anyOf", None)
    if branches is None and isinstance(plain.get("type"), str) and "enum" not in plain and "const" not in plain:
        return {**plain, "type": [plain["type"], "null"]}
    description = {key: plain.pop(key) for key in ("description",) if key in plain}
    branches = branches or [plain]
    if {"type": "null"} not in branches:
        branches = [*branches, {"type": "null"}]
    return {**description, "anyOf": branches}


# Truncation of tool outputs


def truncate_output(output: Content, max_chars: int = MAX_OUTPUT_CHARS) -> Content:
    """Return *output* if it fits, else its first part with a note at the end.

    Args:
        output: The output of a tool.
        max_chars: The maximum length, in characters, including the note.
    """
    if isinstance(output, str):
        return output if len(output) <= max_chars else _truncate_text(output, max_chars, max_chars)
    if sum(map(_count_chars, output)) <= max_chars:
        return output
    return [*_truncate_parts(output, max_chars)]


def _truncate_parts(parts: list[Item], max_chars: int) -> Iterator[Item]:
    """Yield the parts that fit: texts are truncated, other parts are replaced by a note."""
    remaining = max_chars
    for part in parts:
        size, text = _count_chars(part), part.get("text")
        if size <= remaining:
            remaining -= size
            yield part
        elif isinstance(text, str):
            yield {**part, "text": _truncate_text(text, remaining, max_chars)}
            remaining = 0
        else:
            note = OMITTED_PART_NOTE.format(kind=part.get("type"), size=size, max_chars=max_chars)
            yield {"type": "input_text", "text": note}


def _truncate_text(text: str, remaining: int, max_chars: int) -> str:
    note = TRUNCATION_NOTE.format(size=len(text), max_chars=max_chars)
    return text[: max(0, remaining - len(note))] + note


def _count_chars(part: Item) -> int:
    return sum(len(value) for value in part.values() if isinstance(value, str))
