"""Values compared: the arguments of two calls, and a reply's answer with the right one."""

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
MINUSES = str.maketrans("−–", "--")  # noqa: RUF001  # a model writes a minus in more than one way
HALF_A_HUNDREDTH = 0.005 + 1e-9


def same(left: Any, right: Any) -> bool:
    """Whether two JSON values are equal: 1 is 1.0, true is not 1, "a" is not "A", a key that is null is not there."""
    if isinstance(left, dict) and isinstance(right, dict):
        keys = _present(left)
        return keys == _present(right) and all(same(left[key], right[key]) for key in keys)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(same, left, right))
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
    except OverflowError:  # an integer no float can hold is near none
        return False


def matched(calls: Sequence[ToolCall], wanted: Sequence[Call], *, ordered: bool) -> int:
    """Give how many of *wanted* were called, each call counted once; *ordered* counts up to the first that differs."""
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
    return call.name == want.name and same(call.parsed(), want.arguments)


def answered(reply: str) -> str | None:
    """Give what stands on the last `Answer:` line of *reply*, or `None` where there is no such line."""
    lines = reply.splitlines()
    found = [line[match.end() :].strip(MARKS) for line in lines if (match := ANSWER.match(line))]
    return found[-1] or None if found else None


def right(given: str | None, answer: Answer) -> bool:
    """Whether *given* is *answer*: the only number there and right to two decimals, or the same text."""
    if given is None:
        return False
    if isinstance(answer, str):
        return plain(given) == plain(answer)
    numbers: list[str] = NUMBER.findall(given.translate(MINUSES))
    return len(numbers) == 1 and abs(float(numbers[0].replace(",", "")) - answer) <= HALF_A_HUNDREDTH
