"""`gymsdk info`: what one environment is."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gymsdk.cli import options
from gymsdk.plugins import registry

if TYPE_CHECKING:
    from gymsdk.environment import Environment


def info(
    name: Annotated[str, typer.Argument(help="The environment's name, as `gymsdk list` shows it.")],
    *,
    settings: options.Set = [],  # noqa: B006  # typer copies it
    json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Show an environment's splits, row fields, settings, tools and a first task."""
    told = _told(registry.installed().get(name), registry.load(name, **options.settings([name], settings)[name]))
    if json:
        import orjson

        typer.echo(orjson.dumps(told, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS, default=str))
        return
    for title, value in told.items():
        _section(title, value)


def _told(entry: registry.Entry | None, environment: Environment) -> dict[str, Any]:
    from gymsdk.sources import default_split

    first = list(islice(environment.tasks(default_split(environment)), 1)) if environment.splits else []
    return {
        "name": environment.name,
        "package": f"{entry.distribution} {entry.version}" if entry else "",
        "about": entry.summary if entry else "",
        "splits": list(environment.splits),
        "row fields": _fields(environment.task_type.model_json_schema()),
        "settings": _fields(_schema(environment)),
        "tools": {tool.name: tool.schema["description"] for tool in environment.tools.values()},
        "first task": first[0].input if first else [],
    }


def _schema(environment: Environment) -> dict[str, Any]:
    properties = {
        key: {"type": str(field.annotation).replace("typing.", ""), "default": field.default}
        if not field.is_required()
        else {"type": str(field.annotation)}
        for key, field in type(environment.config).model_fields.items()
    }
    return {"properties": properties, "required": [key for key, each in properties.items() if "default" not in each]}


def _fields(schema: dict[str, Any]) -> dict[str, str]:
    required = set(schema.get("required", []))
    return {
        key: str(each.get("type") or " or ".join(str(one.get("type", "object")) for one in each.get("anyOf", [{}])))
        + ("" if key in required else f" = {each.get('default')!r}")
        for key, each in schema.get("properties", {}).items()
    }


def _section(title: str, value: Any) -> None:
    if isinstance(value, dict):
        typer.echo(f"{title}:" if value else f"{title}: none")
        for key, each in value.items():
            typer.echo(f"  {key}: {each}".rstrip())
    elif title == "first task":
        typer.echo(f"{title}:")
        for item in value:
            typer.echo(f"  {item.get('role')}: {_short(item.get('content'))}")
    else:
        typer.echo(f"{title}: {', '.join(value) if isinstance(value, list) else value}")


def _short(content: Any, most: int = 600) -> str:
    from gymsdk.types import text_of

    text = text_of(content)
    return text if len(text) <= most else f"{text[:most]}… ({len(text)} characters)"
