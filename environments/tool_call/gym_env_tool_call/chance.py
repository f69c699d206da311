"""The chance of a row: the highest expected reward of a policy that guesses."""

from __future__ import annotations

import math
from typing import Any

from .grading import worth_of_changes
from .rows import Call, Request

GUESSED_ANSWER = 0.05
"""An upper bound on how often the most frequent answer occurs in generated requests."""

GUESSED_ARGUMENT = 0.1
"""The chance of guessing a number in a ground truth, which is usually small."""


def chance(task: Request) -> float:
    """Return the highest expected reward of guessing at *task*.

    Any call of the only tool solves a weather row. Any reply solves a row with an empty ground truth.
    """
    if task.ground_truth is not None:
        return math.prod(_called(call, task) for call in task.ground_truth)
    if task.expected is None:
        return 1.0
    return (1.0 - worth_of_changes(task.expected)) * GUESSED_ANSWER


def _called(call: Call, task: Request) -> float:
    schema = _schema(call.name, task)
    guesses = [_guessed(value, schema.get(name)) for name, value in call.arguments.items()]
    return math.prod(guesses) / max(1, len(task.tools))


def _schema(name: str, task: Request) -> dict[str, Any]:
    offered = task.responses_create_params.get("tools") or []
    parameters = next((tool.get("parameters") for tool in offered if tool.get("name") == name), None) or {}
    return parameters.get("properties") or {}


def _guessed(value: Any, schema: Any) -> float:
    choices = schema.get("enum") if isinstance(schema, dict) else None
    if choices:
        return 1.0 / len(choices)
    if isinstance(value, bool):
        return 0.5
    return GUESSED_ARGUMENT if isinstance(value, (int, float)) else 0.0
