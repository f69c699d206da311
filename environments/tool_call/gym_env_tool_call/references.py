"""References: placeholders in a plan for values from the outputs of earlier calls."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .rows import Plan

REFERENCE = re.compile(r"\{(\d+)\.([\w.]+)\}")


def fill_references(template: Any, outputs: Mapping[int, Any]) -> Any:
    """Replace each reference in *template* by its value in *outputs*.

    A string that consists of a single reference becomes the value itself. A reference without a value stays
    unchanged.
    """
    if isinstance(template, dict):
        return {key: fill_references(each, outputs) for key, each in template.items()}
    if isinstance(template, list):
        return [fill_references(each, outputs) for each in template]
    if not isinstance(template, str):
        return template
    whole = REFERENCE.fullmatch(template)
    return _named(whole, outputs) if whole else REFERENCE.sub(lambda found: str(_named(found, outputs)), template)


def _named(reference: re.Match[str], outputs: Mapping[int, Any]) -> Any:
    value = outputs.get(int(reference[1]))
    for key in reference[2].split("."):
        if isinstance(value, dict) and key in value:
            value = value[key]
        elif isinstance(value, list) and key.isdecimal() and int(key) < len(value):
            value = value[int(key)]
        else:
            return reference[0]
    return value


def referenced_calls(template: Any) -> set[int]:
    """Return the numbers of the calls that *template* refers to."""
    if isinstance(template, dict):
        return referenced_calls(list(template.values()))
    if isinstance(template, list):
        return {number for each in template for number in referenced_calls(each)}
    return {int(number) for number, _ in REFERENCE.findall(template)} if isinstance(template, str) else set()


def group_turns(plan: Plan) -> list[list[int]]:
    """Group the numbers of the plan's calls by turn. A call is in the first turn in which its references are known."""
    found: list[list[int]] = []
    turn_of: dict[int, int] = {}
    for number, call in enumerate(plan.calls):
        turn = max(
            (turn_of[earlier] + 1 for earlier in referenced_calls(call.arguments) if earlier in turn_of), default=0
        )
        turn_of[number] = turn
        found += [[] for _ in range(turn + 1 - len(found))]
        found[turn].append(number)
    return found
