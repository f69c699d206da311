"""`gymsdk info`: what one environment is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gymsdk.cli import options
from gymsdk.plugins import registry

if TYPE_CHECKING:
    from pydantic import BaseModel

    from gymsdk.environment import Environment
    from gymsdk.transcript import Item

MOST = 600
"""Characters of a message that are shown."""


def info(
    name: Annotated[str, typer.Argument(help="The environment's name, as `gymsdk list` shows it.")],
    *,
    settings: options.Set = [],  # noqa: B006  # typer copies it
    json: options.Json = False,
) -> None:
    """Show what an environment is.

    Its splits, row fields, settings, tools and a first task.
    """
    told = _told(name, registry.load(name, **options.settings([name], settings)[name]))
    if json:
        from gymsdk import rows

        typer.echo(rows.document(told), nl=False)
        return
    typer.echo("\n".join(_lines(told)))


def _told(name: str, environment: Environment) -> dict[str, Any]:
    entry = registry.installed()[name]
    return {
        "name": name,
        "package": f"{entry.distribution} {entry.version}",
        "about": entry.summary,
        "splits": list(environment.splits),
        "settings": _fields(type(environment.config)),
        "row fields": _fields(environment.task_type),
        "tools": [tool.schema for tool in environment.tools.values()],
        "first task": _first(environment),
    }


def _first(environment: Environment) -> list[Item]:
    from gymsdk.rollouts.sources import from_splits

    if not environment.splits:
        return []
    found = from_splits({environment.name: environment}, None, seed=0, limit=1)
    return [item for _, row in found for item in environment.read(row).input]


def _fields(kind: type[BaseModel]) -> list[dict[str, Any]]:
    from pydantic_core import to_jsonable_python

    return [
        {
            "name": name,
            "type": _type(field.annotation),
            "required": field.is_required(),
            "default": None
            if field.is_required()
            else to_jsonable_python(field.get_default(call_default_factory=True), fallback=repr),
            "description": field.description,
        }
        for name, field in kind.model_fields.items()
    ]


def _type(annotation: Any) -> str:
    """Give *annotation* as one writes it, without the modules its names come from."""
    from types import NoneType, UnionType
    from typing import Annotated, Literal, Union, get_args, get_origin

    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " | ".join(map(repr, inner))
    if origin is Annotated:
        return _type(inner[0])
    if origin in {Union, UnionType}:
        return " | ".join(map(_type, inner))
    if origin is not None:
        return f"{getattr(origin, '__name__', origin)}[{', '.join(map(_type, inner))}]"
    if annotation is NoneType or annotation is ...:
        return "None" if annotation is NoneType else "..."
    return str(getattr(annotation, "__name__", annotation))


def _lines(told: dict[str, Any]) -> Iterable[str]:
    yield f"{told['name']} ({told['package']})"
    if told["about"]:
        yield told["about"]
    yield f"\nsplits: {', '.join(told['splits']) or 'none'}"
    for title in ("settings", "row fields"):
        yield f"\n{title}:" if told[title] else f"\n{title}: none"
        yield from map(_field, told[title])
    yield "\ntools:" if told["tools"] else "\ntools: none"
    for tool in told["tools"]:
        yield f"  {tool['name']}({', '.join(tool['parameters'].get('properties', {}))}): {_opening(tool)}".rstrip(": ")
    if told["first task"]:
        yield "\nfirst task:"
        yield from map(_message, told["first task"])


def _field(field: dict[str, Any]) -> str:
    from gymsdk import rows

    default = "" if field["required"] else f" = {_short(rows.written(field['default']).decode(), 60)}"
    told = f"  # {field['description']}" if field["description"] else ""
    return f"  {field['name']}: {_short(field['type'], 80)}{default}{told}"


def _opening(tool: Item) -> str:
    return str(tool.get("description", "")).partition("\n")[0]


def _message(item: Item) -> str:
    from gymsdk.transcript import text_of

    return f"  {item.get('role')}: {_short(text_of(item.get('content')), MOST)}"


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}… ({len(text)} characters)"
