"""Grade with direct calls of math-verify, as in NeMo Gym, and with the environment. For two separate processes."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

from gym_env_math.grading import Grade, compare_integers, find_only_box, grade, strip_delimiters, wrap_in_box

Result = tuple[float, str | None]


class Graded(NamedTuple):
    """The results of `grade` with and without the shortcut's box, and of the integer shortcut."""

    plain: Grade | None
    by_box: Grade | None
    whole: Grade | None


@lru_cache(maxsize=1)
def _metric() -> Callable[[list[str], list[str]], tuple[float, Any]]:
    from math_verify.metric import math_metric
    from math_verify.parser import ExprExtractionConfig, LatexExtractionConfig

    for name in ("math_verify", "latex2sympy2_extended"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    return math_metric(
        gold_extraction_target=(LatexExtractionConfig(),),
        pred_extraction_target=(ExprExtractionConfig(), LatexExtractionConfig()),
    )


def direct(expected: str, text: str) -> Result:
    from math_verify import grader
    from math_verify.errors import TimeoutException

    assert "gym_env_math.latex_parser" not in sys.modules, "this process must use the unchanged math-verify"
    try:
        score, extracted = _metric()([wrap_in_box(strip_delimiters(expected))], [text])
        if extracted is None:
            return float(score), None
        golds, answers = extracted
        right = [answer for answer in answers if any(grader.verify(gold, answer) for gold in golds)]
        return float(score), (right or answers)[0]
    except (Exception, TimeoutException):  # noqa: BLE001 -- any exception counts as no answer
        return 0.0, None


def direct_all(pairs: list[tuple[str, str]]) -> list[Result]:
    return [direct(*pair) for pair in pairs]


def grade_in_all_ways(pairs: list[tuple[str, str]]) -> list[Graded]:
    return [_grade_in_all_ways(*pair) for pair in pairs]


def _grade_in_all_ways(expected: str, text: str) -> Graded:
    gold, box = strip_delimiters(expected), find_only_box(text)
    return Graded(
        plain=grade.__wrapped__(gold, text, None, keep_gold=False),
        by_box=grade.__wrapped__(gold, text, box, keep_gold=True),
        whole=None if box is None else compare_integers(gold, box),
    )


def grade_all(pairs: list[tuple[str, str]]) -> list[Grade | None]:
    return [grade.__wrapped__(strip_delimiters(gold), text, None, keep_gold=True) for gold, text in pairs]
