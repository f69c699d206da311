"""Options: what a policy can see that an answer might be one of."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from gymsdk.transcript import Item

MOST = 60
"""How many options are taken."""

_LINES = re.compile(r"^\s*(?:\(?([^\W\d_]|\d{1,2})[).:]|[-*])\s+(\S.*)$", re.MULTILINE)
_INLINE = re.compile(r"\(([^\W\d_]|\d{1,2})\)\s*([^()\n,;]*)")
_LETTERS = re.compile(r"(?<![A-Za-z])([A-H])[).:]\s*([^\n]*?)(?=\s+[A-H][).:]|\n|$)")
_QUOTED = re.compile(r"""['"`\N{LEFT DOUBLE QUOTATION MARK}]([^'"`\n]{1,40})['"`\N{RIGHT DOUBLE QUOTATION MARK}]""")
_EITHER = re.compile(r"\b(\w+)(?:, (\w+))* or (\w+)\b")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def options(prompt: str) -> list[str]:
    """Give what *prompt* offers to choose from: listed letters and their texts, quoted words, one thing or another."""
    found: dict[str, None] = {}
    for pattern in (_LINES, _INLINE, _LETTERS, _QUOTED, _EITHER):
        for match in pattern.findall(prompt):
            parts = (match,) if isinstance(match, str) else match
            found.update(dict.fromkeys(part.strip() for part in parts if part.strip()))
    return list(found)[:MOST]


def letters(prompt: str) -> list[str]:
    """Give the letters or numbers that stand before the options *prompt* lists, each once."""
    marks = [match[0] for pattern in (_LINES, _INLINE, _LETTERS) for match in pattern.findall(prompt)]
    return list(dict.fromkeys(mark for mark in marks if mark))


def numbers(text: str) -> list[str]:
    """Give the numbers in *text*, each once."""
    return list(dict.fromkeys(_NUMBER.findall(text)))


def listed(tool: Item) -> Iterator[dict[str, Any]]:
    """Yield arguments of *tool* with each value its schema lists, something plain for the rest."""
    properties = (tool.get("parameters") or {}).get("properties") or {}
    plain = {name: plain_value(schema) for name, schema in properties.items()}
    for name, schema in properties.items():
        yield from ({**plain, name: value} for value in choices(schema))


def choices(schema: Any) -> list[Any]:
    """Give the values *schema* lists."""
    if not isinstance(schema, dict):
        return []
    nested = [value for each in schema.get("anyOf") or [] for value in choices(each)]
    return [*(schema.get("enum") or []), *_few(schema), *nested]


def _few(schema: Item) -> list[Any]:
    """Give both truth values, or the whole numbers of a small range."""
    if schema.get("type") == "boolean":
        return [True, False]
    low, high = _bound(schema, "inimum", 1), _bound(schema, "aximum", -1)
    if schema.get("type") != "integer" or low is None or high is None or not 0 <= high - low < MOST:
        return []
    return list(range(low, high + 1))


def _bound(schema: Item, name: str, inward: int) -> int | None:
    """Give the outermost whole number that a `minimum` or `maximum`, exclusive or not, allows."""
    bound, beyond = schema.get(f"m{name}"), schema.get(f"exclusiveM{name}")
    if isinstance(bound, int):
        return bound
    return beyond + inward if isinstance(beyond, int) else None


def plain_value(schema: Any) -> Any:
    """Give a plain value of about the shape *schema* describes."""
    return valued(schema, {"string": "a", "integer": 1, "number": 1.0, "boolean": True})


def valued(schema: Any, values: dict[str, Any]) -> Any:
    """Give a value of the shape *schema* describes, its plain parts taken from *values* by their type."""
    if not isinstance(schema, dict):
        return values["string"]
    if listed_values := choices(schema):
        return listed_values[0]
    kind = next((each for each in _kinds(schema) if each != "null"), "null")
    if kind == "array":
        return [valued(schema.get("items"), values)]
    if kind == "object":
        return {key: valued(each, values) for key, each in (schema.get("properties") or {}).items()}
    return values.get(kind)


def _kinds(schema: Item) -> list[str]:
    kind = schema.get("type")
    if isinstance(kind, str):
        return [kind]
    if isinstance(kind, list):
        return [str(each) for each in kind]
    return [each for one in schema.get("anyOf") or [] if isinstance(one, dict) for each in _kinds(one)] or ["string"]
