"""The verdict: the values of the last extraction against the expected ones."""

from __future__ import annotations

from gymsdk import ToolCall, Verdict

from .task import SynonymTask

LARGEST = 2**63
"""Beyond it a number is no value of any word, and no JSON reader need take it."""


class SynonymVerdict(Verdict):
    """Whether the extraction is right, and in which way it is wrong.

    *set_overlap* is the share of expected values that were extracted, *original_term_minefield_hit* says that the
    term itself was, *order_instruction_following_failure* that only the order or a surplus is wrong.
    """

    accuracy: bool
    set_overlap: float
    original_term_minefield_hit: bool
    order_instruction_following_failure: bool
    parsed_synonym_values: list[int]


def judged(task: SynonymTask, calls: list[ToolCall]) -> SynonymVerdict:
    """Give the verdict on the last of *calls*; none, or one whose values are no list of integers, earns 0."""
    given = _given(calls[-1]) if calls else []
    values = _integers(given)
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


def _given(call: ToolCall) -> list[object]:
    """Give the members of the list in *call*, of whatever type; nothing where there is no list."""
    values = (call.parsed() or {}).get("synonym_values")
    return values if isinstance(values, list) else []


def _integers(given: list[object]) -> list[int]:
    """Give all members as integers, or nothing where one is none."""
    numbers = [number for each in given if (number := _integer(each)) is not None]
    return numbers if len(numbers) == len(given) else []


def _integer(given: object) -> int | None:
    # As in JSON Schema, 5.0 is the integer 5; a truth value is none, though Python counts it as one.
    if isinstance(given, float) and given.is_integer():
        return _integer(int(given))
    if isinstance(given, bool) or not isinstance(given, int):
        return None
    return given if abs(given) < LARGEST else None
