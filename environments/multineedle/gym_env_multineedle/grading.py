"""Grade an extraction against the expected values, and compute the metrics by number of needles."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from statistics import fmean

from gymsdk import Rollout, ToolCall, Verdict

from .haystack import SynonymTask

MAX_VALUE = 2**63
"""Integers with an absolute value that reaches this bound are rejected: no word has such a value, and some JSON readers
cannot read such integers."""


class SynonymVerdict(Verdict):
    """The verdict on the last extraction.

    Attributes:
        accuracy: Whether the values are exactly the expected values in the expected order.
        set_overlap: The share of the expected values that the policy extracted.
        original_term_minefield_hit: Whether the policy extracted the term itself or its value.
        order_instruction_following_failure: Whether all expected values are present, but the order is wrong or
            there are additional values.
        parsed_synonym_values: The extracted integers.
    """

    accuracy: bool
    set_overlap: float
    original_term_minefield_hit: bool
    order_instruction_following_failure: bool
    parsed_synonym_values: list[int]


def grade_extraction(task: SynonymTask, calls: list[ToolCall]) -> SynonymVerdict:
    """Grade the last of *calls*.

    Args:
        task: The row with the expected values.
        calls: The calls of `extract_synonym_values`, in order.

    Returns:
        The verdict. The reward is 0.0 if *calls* is empty or the values of the last call are not a list of integers.
    """
    given = _get_items(calls[-1]) if calls else []
    values = _convert_items(given)
    expected = task.expected_synonym_values
    overlap = len(set(values) & set(expected)) / len(expected)
    accuracy = values == expected
    return SynonymVerdict(
        reward=float(accuracy),
        accuracy=accuracy,
        set_overlap=overlap,
        original_term_minefield_hit=task.minefield_label in given or task.minefield_label_value in values,
        order_instruction_following_failure=not accuracy and overlap == 1.0,
        parsed_synonym_values=values,
    )


def _get_items(call: ToolCall) -> list[object]:
    """Return the items of the list in *call*, of any type, or an empty list if *call* holds no list."""
    values = (call.parsed() or {}).get("synonym_values")
    return values if isinstance(values, list) else []


def _convert_items(given: list[object]) -> list[int]:
    """Return all items as integers, or an empty list if any item is not an integer."""
    numbers = [number for each in given if (number := _convert_item(each)) is not None]
    return numbers if len(numbers) == len(given) else []


def _convert_item(given: object) -> int | None:
    # As in JSON Schema, 5.0 is the integer 5. A boolean is not an integer, although `bool` subclasses `int` in Python.
    if isinstance(given, float) and given.is_integer():
        return _convert_item(int(given))
    if isinstance(given, bool) or not isinstance(given, int):
        return None
    return given if abs(given) < MAX_VALUE else None


def compute_metrics(rollouts: Iterable[Rollout]) -> dict[str, float]:
    """Return `needles=<n>/mean/reward` for each number of expected values."""
    found: defaultdict[int, list[float]] = defaultdict(list)
    for rollout in rollouts:
        if rollout.reward is not None:
            found[len(rollout.row["expected_synonym_values"])].append(rollout.reward)
    return {f"needles={number}/mean/reward": fmean(found[number]) for number in sorted(found)}
