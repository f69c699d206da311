"""`gymsdk info`: describe an environment."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gymsdk.cli import options
from gymsdk.cli.output import echo, print_json
from gymsdk.plugins import registry

if TYPE_CHECKING:
    from pydantic import BaseModel

    from gymsdk.environment import Environment
    from gymsdk.types import Item

MAX_TEXT_CHARS = 600
"""The maximum number of characters of a message in the output."""


def info(
    name: Annotated[str, typer.Argument(help="Name the environment, as `gymsdk list` shows it.")],
    *,
    settings: options.Settings = [],  # noqa: B006  # typer copies the list
    json: options.Json = False,
) -> None:
    """Describe an environment: splits, fields, settings and tools.

    The last part of the output is the first task of the default split.

    Examples:
        gymsdk info math
    """
    description = _describe_environment(name, registry.load(name, **options.parse_settings([name], settings)[name]))
    if json:
        print_json(description)
        return
    echo("\n".join(_format_lines(description)))


def _describe_environment(name: str, environment: Environment) -> dict[str, Any]:
    entry = registry.installed()[name]
    return {
        "name": name,
        "package": f"{entry.distribution} {entry.version}",
        "about": entry.summary,
        "splits": list(environment.splits),
        "settings": describe_fields(type(environment.config)),
        "row fields": describe_fields(environment.task_type),
        "tools": [tool.schema for tool in environment.tools.values()],
        "first task": _read_first_task(environment),
    }


def _read_first_task(environment: Environment) -> list[Item]:
    """Return the prompt of the first task of the default split; empty if the environment has no splits."""
    from gymsdk.rollouts.tasks import read_splits

    if not environment.splits:
        return []
    # At most one row: a split may be infinite, and a row expensive.
    rows = read_splits({environment.name: environment}, None, seed=0, limit=1)
    return [item for _, row in rows for item in environment.read(row).input]


def describe_fields(model: type[BaseModel]) -> list[dict[str, Any]]:
    """Return name, type, default and description of each field of *model*."""
    from pydantic_core import to_jsonable_python

    return [
        {
            "name": name,
            "type": _format_type(field.annotation),
            "required": field.is_required(),
            "default": None
            if field.is_required()
            else to_jsonable_python(field.get_default(call_default_factory=True), fallback=repr),
            "description": field.description,
        }
        for name, field in model.model_fields.items()
    ]


def _format_type(annotation: Any) -> str:
    """Return *annotation* as source code without module names."""
    from types import NoneType, UnionType
    from typing import Annotated, Literal, Union, get_args, get_origin

    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " | ".join(map(repr, arguments))
    if origin is Annotated:
        return _format_type(arguments[0])
    if origin in {Union, UnionType}:
        return " | ".join(map(_format_type, arguments))
    if origin is not None:
        return f"{getattr(origin, '__name__', origin)}[{', '.join(map(_format_type, arguments))}]"
    if annotation is NoneType or annotation is ...:
        return "None" if annotation is NoneType else "..."
    return str(getattr(annotation, "__name__", annotation))


def _format_lines(description: dict[str, Any]) -> Iterable[str]:
    """Yield the lines for a person to read."""
    yield f"{description['name']} ({description['package']})"
    if description["about"]:
        yield description["about"]
    yield f"\nsplits: {', '.join(description['splits']) or 'none'}"
    for title in ("settings", "row fields"):
        yield f"\n{title}:" if description[title] else f"\n{title}: none"
        yield from map(_format_field, description[title])
    yield "\ntools:" if description["tools"] else "\ntools: none"
    for tool in description["tools"]:
        parameters = ", ".join(tool["parameters"].get("properties", {}))
        summary = str(tool.get("description", "")).partition("\n")[0]
        yield f"  {tool['name']}({parameters}): {summary}".rstrip(": ")
    if description["first task"]:
        yield "\nfirst task:"
        yield from map(_format_message, description["first task"])


def _format_field(field: dict[str, Any]) -> str:
    from gymsdk import jsonl

    default = "" if field["required"] else f" = {_shorten(jsonl.dump_portable_json(field['default']).decode(), 60)}"
    comment = f"  # {field['description']}" if field["description"] else ""
    return f"  {field['name']}: {_shorten(field['type'], 80)}{default}{comment}"


def _format_message(item: Item) -> str:
    from gymsdk.types import extract_text

    return f"  {item.get('role')}: {_shorten(extract_text(item.get('content')), MAX_TEXT_CHARS)}"


def _shorten(text: str, max_chars: int) -> str:
    return text if len(text) <= max_chars else f"{text[:max_chars]}… ({len(text)} characters)"
