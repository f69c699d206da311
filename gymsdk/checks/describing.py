"""Checks of the schemas of tools and of the descriptions of tools and settings."""

from __future__ import annotations

import re
from collections.abc import Iterator

from gymsdk.checks.report import Check, Finding, NotApplicable
from gymsdk.checks.subject import Subject
from gymsdk.types import Item

TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
"""The tool names that providers accept."""

JSON_TYPES = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})


async def _check_schemas(subject: Subject) -> list[Finding]:
    offered = _collect_tools(subject)
    if not offered:
        raise NotApplicable("it has no tools")
    return [
        Finding(seen=f"tool {name!r}: {wrong}") for name, tool in offered.items() for wrong in _list_tool_errors(tool)
    ]


def _collect_tools(subject: Subject) -> dict[str, Item]:
    """Return the schemas of the environment's tools and of the tools that its rows list, by name."""
    own_tools = {name: tool.schema for name, tool in subject.environment.tools.items()}
    listed = (tool for task in subject.tasks for tool in task.responses_create_params.get("tools") or [])
    return {str(tool.get("name")): tool for tool in listed} | own_tools


def _list_tool_errors(tool: Item) -> Iterator[str]:
    if not TOOL_NAME.fullmatch(str(tool.get("name"))):
        yield "its name must be 1 to 64 letters, digits, `_` and `-`"
    shape = tool.get("parameters")
    if not isinstance(shape, dict) or shape.get("type", "object") != "object":
        yield "its parameters are not the schema of an object"
        return
    yield from _list_schema_errors(shape, shape, "parameters")
    if tool.get("strict"):
        yield from _list_strict_errors(shape, "parameters")


def _list_schema_errors(node: object, whole: Item, place: str) -> Iterator[str]:
    """Yield why *node*, at *place* of the schema *whole*, is not valid JSON Schema."""
    if isinstance(node, bool):
        return
    if not isinstance(node, dict):
        yield f"{place} is {node!r} instead of a schema"
        return
    kinds = node.get("type", [])
    if not set(kinds if isinstance(kinds, list) else [kinds]) <= JSON_TYPES:
        yield f"{place} has the type {kinds!r}, which JSON Schema does not define"
    if "enum" in node and not (isinstance(node["enum"], list) and node["enum"]):
        yield f"{place} has an `enum` without values"
    if "$ref" in node and not _resolves(str(node["$ref"]), whole):
        yield f"{place} refers to {node['$ref']!r}, which does not exist"
    required = set(node.get("required") or [])
    if not required <= set(node.get("properties", required)):
        yield f"{place} requires a property that it does not define"
    for key, each in _iter_subschemas(node):
        yield from _list_schema_errors(each, whole, f"{place}.{key}")


def _iter_subschemas(node: Item) -> Iterator[tuple[str, object]]:
    """Yield the direct subschemas of *node* with their places."""
    for group in ("properties", "$defs"):
        children = node.get(group, {})
        yield from children.items() if isinstance(children, dict) else [(group, children)]
    for group in ("anyOf", "oneOf", "allOf", "prefixItems"):
        yield from ((f"{group}.{number}", each) for number, each in enumerate(node.get(group, [])))
    for key in ("items", "additionalProperties"):
        if key in node:
            yield key, node[key]


def _resolves(reference: str, whole: Item) -> bool:
    node: object = whole
    for word in reference.removeprefix("#").strip("/").split("/") if reference != "#" else []:
        node = node.get(word) if isinstance(node, dict) else None
    return node is not None


def _list_strict_errors(node: object, place: str) -> Iterator[str]:
    """Yield why a provider rejects a schema that is marked as strict."""
    if not isinstance(node, dict):
        return
    if "properties" in node and node.get("additionalProperties") is not False:
        yield f"{place} is strict but lacks `additionalProperties: false`"
    if missing := sorted(set(node.get("properties", {})) - set(node.get("required", []))):
        yield f"{place} is strict but does not require {', '.join(missing)}"
    for key, each in _iter_subschemas(node):
        yield from _list_strict_errors(each, f"{place}.{key}")


async def _check_descriptions(subject: Subject) -> list[Finding]:
    problems = [
        f"the tool {name!r} has no description"
        for name, tool in _collect_tools(subject).items()
        if not _read_description(tool)
    ]
    problems += [
        wrong for tool in subject.environment.tools.values() for wrong in _list_undescribed_arguments(tool.schema)
    ]
    problems += [f"the setting {name!r} has no description" for name in _list_undescribed_settings(subject)]
    return [Finding(seen=each) for each in problems]


def _read_description(node: Item) -> bool:
    return bool(str(node.get("description") or "").strip())


def _list_undescribed_arguments(tool: Item) -> Iterator[str]:
    """Yield the arguments that neither their own nor the tool's description mentions."""
    described_words = _extract_words(str(tool.get("description")))
    for name, node in tool["parameters"].get("properties", {}).items():
        if not _read_description(node) and not set(name.lower().split("_")) & described_words:
            yield f"the argument {name!r} of the tool {tool['name']!r} has no description"


def _list_undescribed_settings(subject: Subject) -> Iterator[str]:
    """Yield the settings that neither their own description nor the class's docstring mentions."""
    kind = type(subject.environment.config)
    described_words = set(re.findall(r"\w+", kind.__doc__ or ""))
    for name, field in kind.model_fields.items():
        if not field.description and name not in described_words:
            yield name


def _extract_words(text: str) -> set[str]:
    """Return the words of *text* in singular and plural form."""
    words = re.findall(r"[a-z0-9]+", text.lower())
    return {form for word in words for form in (word, word.removesuffix("s"), f"{word}s")}


CHECKS: tuple[Check, ...] = (
    Check(
        id="runtime.tool_schemas",
        asks="every tool's schema is valid JSON Schema, and a schema marked as strict is strict",
        why="a provider rejects the whole request if one schema is invalid: every episode fails at its first turn",
        mend="let the tool's annotations generate its schema; in rows that list tools, write schemas in strict form",
        run=_check_schemas,
    ),
    Check(
        id="runtime.descriptions",
        asks="every tool, argument and setting has a description",
        why="a policy knows a tool, and a user knows a setting, only by its description",
        mend="give the tool a docstring, an argument `Annotated[..., Field(description=...)]` or a word in that"
        " docstring, a setting `Field(description=...)` or a word in its class's",
        run=_check_descriptions,
    ),
)
