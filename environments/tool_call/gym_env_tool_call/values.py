"""Compare values: the arguments of calls, and the answer in a reply with the expected answer."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from gymsdk import ToolCall

from .records import plain
from .rows import Answer, Call

ANSWER = re.compile(r"[\s>*_#`-]*answer[*_`]*\s*:", re.IGNORECASE)
MARKS = " \t*_`"
NUMBER = re.compile(r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?")
MINUSES = str.maketrans("−–", "--")  # noqa: RUF001  # models write different minus characters
HALF_A_HUNDREDTH = 0.005 + 1e-9


def json_equal(left: Any, right: Any) -> bool:
    """Return whether two JSON values are equal.

    1 equals 1.0, true does not equal 1, and "a" does not equal "A". A key with the value null counts as absent.
    """
    if isinstance(left, dict) and isinstance(right, dict):
        keys = _present(left)
        return keys == _present(right) and all(json_equal(left[key], right[key]) for key in keys)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(json_equal, left, right))
    if _is_number(left) and _is_number(right):
        return _same_number(left, right)
    return type(left) is type(right) and bool(left == right)


def _present(value: dict[str, Any]) -> set[str]:
    return {key for key, each in value.items() if each is not None}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _same_number(left: float, right: float) -> bool:
    if left == right:
        return True
    if isinstance(left, int) and isinstance(right, int):
        return False
    try:
        return math.isclose(left, right, rel_tol=1e-9)
    except OverflowError:  # an integer beyond the range of floats is not close to any float
        return False


def count_matching_calls(calls: Sequence[ToolCall], wanted: Sequence[Call], *, ordered: bool) -> int:
    """Count the wanted calls among *calls*.

    Args:
        calls: The calls of the policy.
        wanted: The wanted calls.
        ordered: Whether to compare position by position and stop at the first difference.

    Returns:
        The number of wanted calls that the policy made. Each call matches at most one wanted call.
    """
    if ordered:
        pairs = zip(calls, wanted, strict=False)
        return next((index for index, pair in enumerate(pairs) if not _fits(*pair)), min(len(calls), len(wanted)))
    left = list(calls)
    found = 0
    for want in wanted:
        fit = next((index for index, call in enumerate(left) if _fits(call, want)), None)
        if fit is not None:
            del left[fit]
            found += 1
    return found


def _fits(call: ToolCall, want: Call) -> bool:
    return call.name == want.name and json_equal(call.parsed(), want.arguments)


def extract_answer(reply: str) -> str | None:
    """Return the text of the last `Answer:` line in *reply*, or `None` if there is no such line."""
    lines = reply.splitlines()
    found = [line[match.end() :].strip(MARKS) for line in lines if (match := ANSWER.match(line))]
    return found[-1] or None if found else None


def is_correct(given: str | None, answer: Answer) -> bool:
    """Return whether *given* equals *answer*.

    A number must be the only number in *given* and match to two decimals. Text must be equal after normalization.
    """
    if given is None:
        return False
    if isinstance(answer, str):
        return plain(given) == plain(answer)
    numbers: list[str] = NUMBER.findall(given.translate(MINUSES))
    return len(numbers) == 1 and abs(float(numbers[0].replace(",", "")) - answer) <= HALF_A_HUNDREDTH
