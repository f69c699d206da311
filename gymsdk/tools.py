"""A tool: a function a policy may call, the schema it is shown, and the check its arguments pass.

Schemas are strict in the sense of OpenAI's function calling: every argument is required, a defaulted one is
nullable and null means the default (https://platform.openai.com/docs/guides/function-calling#strict-mode).
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NotRequired

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config
from pydantic.errors import PydanticUserError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticSerializationError, to_json
from typing_extensions import TypedDict

from gymsdk import complaints, schemas, values
from gymsdk.annotations import annotation, parameters
from gymsdk.errors import suggestion
from gymsdk.transcript import Content, Item

GIVEN = frozenset({"state", "task", "config", "shared"})
"""Parameter names the host fills; a policy never sees them."""


PARTS = frozenset({"input_text", "input_image", "input_file"})
"""The types of content parts a tool may return a list of; any other list is data, and written as JSON."""


class WrongArguments(ValueError):
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
            given = values.parsed(text or "{}", strict=True)
        except ValueError as error:
            raise WrongArguments(f"Invalid tool call arguments: {error}") from None
        if not isinstance(given, dict):
            raise WrongArguments(f"Invalid tool call arguments: {self.name} takes a JSON object")
        present = {key: value for key, value in given.items() if value is not None or key not in self.optional}
        try:
            return self.arguments.validate_python(present)
        except ValidationError as error:
            raise WrongArguments(f"Invalid tool call arguments for {self.name}: {complaints.sentence(error)}") from None

    def received(self, text: str) -> bytes:
        """Return what the function receives for the arguments in *text*, as JSON: equal for equal calls.

        Values are converted to the types of the parameters, and defaults are filled in.

        Raises:
            WrongArguments: The tool refuses the arguments.
            ValueError: JSON cannot hold what the function receives.
        """
        taken = parameters(self.function)
        arguments = {key: taken[key].default for key in sorted(self.optional)} | self.parse_arguments(text)
        return values.ordered(self.arguments.dump_python(arguments, mode="json", warnings=False))


def tool(function: Callable[..., Any]) -> Tool:
    """Give the tool *function* makes; raises `TypeError` naming a parameter that cannot be offered."""
    name = getattr(function, "__name__", "")
    if not inspect.isroutine(function) or not name.isidentifier():
        raise TypeError(f"tool {function!r} has no name a policy could call; write it as a named function")
    taken = parameters(function)
    given = {key: parameter for key, parameter in taken.items() if key not in GIVEN}
    optional = frozenset(key for key, parameter in given.items() if parameter.default is not parameter.empty)
    kinds = {key: _kind(name, function, parameter) for key, parameter in given.items()}
    try:
        arguments = _adapter(name, {key: NotRequired[kinds[key]] if key in optional else kinds[key] for key in kinds})
        schema = _schema(name, function, arguments.json_schema())
    except PydanticUserError as error:
        raise TypeError(f"tool {name!r}: {str(error).splitlines()[0]}") from None
    return Tool(name, function, arguments, optional, GIVEN & taken.keys(), schema)


def toolbox(functions: Iterable[Callable[..., Any]]) -> dict[str, Tool]:
    """Give the tools *functions* make, by name; raises `TypeError` where one cannot be offered, or two share a name."""
    found: dict[str, Tool] = {}
    for made in map(tool, functions):
        if made.name in found:
            raise TypeError(f"two tools are named {made.name!r}")
        found[made.name] = made
    return found


def _adapter(name: str, kinds: dict[str, Any]) -> TypeAdapter[dict[str, Any]]:
    fields = TypedDict(name, kinds)  # type: ignore[misc]  # its fields are known at run time only
    adapt: Callable[[Any], TypeAdapter[dict[str, Any]]] = TypeAdapter
    return adapt(with_config(ConfigDict(extra="forbid"))(fields))


def _kind(name: str, function: Callable[..., Any], parameter: inspect.Parameter) -> Any:
    if parameter.kind in {parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY}:
        raise TypeError(f"tool {name!r}: parameter {parameter.name!r} has no name a policy could give")
    if isinstance(parameter.default, FieldInfo):
        raise TypeError(
            f"tool {name!r}: parameter {parameter.name!r} has a `Field(...)` for its default; write"
            " `Annotated[..., Field(...)]` for its type, and a plain default"
        )
    try:
        kind = annotation(function, parameter.name)
    except NameError as error:
        raise TypeError(f"tool {name!r}: the annotation of {parameter.name!r} names nothing: {error}") from None
    if kind is None:
        raise TypeError(f"tool {name!r}: parameter {parameter.name!r} needs a type; it becomes the tool's schema")
    return kind


def _schema(name: str, function: Callable[..., Any], shape: Item) -> Item:
    plain = schemas.untitled(shape)
    strict = schemas.strict(plain)
    return {
        "type": "function",
        "name": name,
        "description": inspect.getdoc(function) or "",
        "parameters": plain if strict is None else strict,
        "strict": strict is not None,
    }


def written(value: object) -> Content:
    """Give what a tool returned as the policy reads it: text and content parts as they are, the rest as JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(map(_is_part, value)):
        return value
    try:
        return to_json(value).decode()
    except (PydanticSerializationError, ValueError, RecursionError) as error:
        raise TypeError(f"returned something JSON cannot hold: {error}") from None


def _is_part(value: object) -> bool:
    return isinstance(value, dict) and str(value.get("type")) in PARTS


def refusal(message: str) -> str:
    """Give *message* as the output of a call that was not run."""
    return json.dumps({"error": message}, ensure_ascii=False)


def unknown(name: str, offered: Mapping[str, object]) -> str:
    """Give the sentence that answers a call of a tool that is not on offer."""
    listed = ", ".join(offered) or "none"
    near = suggestion(name, offered).replace("; did", "Did", 1)
    return " ".join(filter(None, [f"There is no tool named {name!r}.", near, f"Tools on offer: {listed}."]))
