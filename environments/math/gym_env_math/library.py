"""Grade with math-verify, in a worker process with limits on CPU, memory and time (`gym-env-math[sympy]`)."""

from __future__ import annotations

import importlib.util
import logging
from functools import lru_cache
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any, NamedTuple

from gymsdk import offload

GRADER = "math-verify"
MAX_CACHED_GOLDS = 2048
DECIMAL_PLACES = 6


class Grade(NamedTuple):
    """The grade of an answer, and the answer that math-verify found."""

    reward: float
    extracted: str | None


def is_installed() -> bool:
    """Return whether math-verify can be imported."""
    return importlib.util.find_spec("math_verify") is not None


def get_version() -> str:
    """Return the version of math-verify."""
    return version("math-verify")


@offload(cpu=10.0, preload=["gym_env_math.warm_up"])
def grade(gold: str, text: str) -> Grade | None:
    """Grade *text* in a worker process.

    Args:
        gold: The expected answer without delimiters.
        text: The text of the policy.

    Returns:
        The grade, or `None` if math-verify cannot read the gold answer.
    """
    known = _parse_gold(gold)
    return None if known is None else _compare(known, _parse_answers(text))


@offload(cpu=10.0, preload=["gym_env_math.warm_up"])
def is_readable(gold: str) -> bool:
    """Return whether math-verify can read the gold answer."""
    return _parse_gold(gold) is not None


class _ParsedGold(NamedTuple):
    expressions: list[Any]
    written: frozenset[str]


@lru_cache(maxsize=1)
def _library() -> SimpleNamespace:
    import math_verify
    from math_verify.errors import TimeoutException

    for name in ("math_verify", "latex2sympy2_extended"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    formulas, numbers = math_verify.LatexExtractionConfig(), math_verify.ExprExtractionConfig()
    return SimpleNamespace(
        parse=math_verify.parse,
        verify=math_verify.verify,
        gold_targets=(formulas,),
        answer_targets=(numbers, formulas),
        errors=(Exception, TimeoutException),
    )


@lru_cache(maxsize=MAX_CACHED_GOLDS)
def _parse_gold(gold: str) -> _ParsedGold | None:
    library = _library()
    # Disable the timeouts of math-verify: they use SIGALRM, and the worker already has a deadline.
    expressions = library.parse(f"\\boxed{{{gold}}}", library.gold_targets, parsing_timeout=None)
    try:
        written = frozenset(str(reading).strip() for reading in expressions)
    except library.errors:
        return None
    return _ParsedGold(expressions, written - {""}) if expressions else None


def _parse_answers(text: str) -> list[Any]:
    library = _library()
    expressions: list[Any] = library.parse(text, library.answer_targets, parsing_timeout=None)
    return expressions


def _compare(gold: _ParsedGold, answers: list[Any]) -> Grade:
    library = _library()
    try:
        right = library.verify(gold.expressions, answers, DECIMAL_PLACES, timeout_seconds=None)
        return Grade(float(right), _get_extracted_text(gold, answers))
    except library.errors:
        # An answer that cannot be converted to text, for example because it has too many digits, counts as wrong.
        return Grade(0.0, None)


def _get_extracted_text(gold: _ParsedGold, answers: list[Any]) -> str | None:
    written = [str(answer) for answer in answers]
    first = written[0] if written else None
    return next((text for text in written if text.strip() in gold.written), first)
