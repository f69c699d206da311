"""Grade with direct calls of math-verify, as in NeMo Gym, and with the environment. For two separate processes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from gym_env_math.grading import strip_delimiters, wrap_in_box
from gym_env_math.library import Grade, grade

Result = tuple[float, str | None]


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


def grade_all(pairs: list[tuple[str, str]]) -> list[Grade | None]:
    return [grade.__wrapped__(strip_delimiters(gold), text) for gold, text in pairs]
