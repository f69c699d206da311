"""Extract the answer from a text and compare it with the gold answer, using math-verify."""

from __future__ import annotations

import logging
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, NamedTuple

from gymsdk import offload

from .shortcut import Grade

KEPT_GOLDS = 2048
PRECISION = 6


def bare(expected: str) -> str:
    r"""Return the gold answer without surrounding whitespace, `\( \)` or `$ $`."""
    gold = expected.strip()
    if len(gold) >= len(r"\(\)") and gold.startswith(r"\(") and gold.endswith(r"\)"):
        gold = gold[2:-2].strip()
    if len(gold) >= len("$$") and gold.startswith("$") and gold.endswith("$"):
        gold = gold[1:-1].strip()
    return gold


def boxed(content: str) -> str:
    r"""Return *content* in a `\boxed{}`."""
    return f"\\boxed{{{content}}}"


@offload(timeout=30.0, cpu=10.0, preload=["math_verify"])
def grade(gold: str, text: str, box: str | None, keep_gold: bool) -> Grade | None:
    """Grade *text* in a worker process.

    Args:
        gold: The expected answer without delimiters.
        text: The text of the policy.
        box: The content of the only box in *text*, or `None`. If math-verify can read this content, it decides
            the grade alone (see `shortcut`).
        keep_gold: Whether to cache the parsed gold answer.

    Returns:
        The grade, or `None` if math-verify cannot read the gold answer.
    """
    known = _kept_gold(gold) if keep_gold else _gold(gold)
    if known is None:
        return None
    alone = _predictions(boxed(box), first_match=True) if box is not None else []
    # math-verify returns the expression and its source text. A single item means that it could not parse the text.
    settled = len(alone) > 1
    return _compare(known, alone if settled else _predictions(text), settled=settled)


@offload(timeout=30.0, cpu=10.0, preload=["math_verify"])
def readable(gold: str) -> bool:
    """Return whether math-verify can read the gold answer."""
    return _gold(gold) is not None


class _Gold(NamedTuple):
    readings: list[Any]
    written: frozenset[str]


@lru_cache(maxsize=1)
def _library() -> SimpleNamespace:
    import math_verify
    from math_verify.errors import TimeoutException

    for name in ("math_verify", "latex2sympy2_extended"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    latex, plain = math_verify.LatexExtractionConfig(), math_verify.ExprExtractionConfig()
    return SimpleNamespace(
        parse=math_verify.parse,
        verify=math_verify.verify,
        gold_targets=(latex,),
        answer_targets=(plain, latex),
        errors=(Exception, TimeoutException),
    )


def _gold(gold: str) -> _Gold | None:
    library = _library()
    # Disable the timeouts of math-verify: they use SIGALRM, and the worker already has a deadline.
    readings = library.parse(boxed(gold), library.gold_targets, parsing_timeout=None)
    try:
        written = frozenset(str(reading).strip() for reading in readings)
    except library.errors:
        return None
    return _Gold(readings, written - {""}) if readings else None


_kept_gold = lru_cache(maxsize=KEPT_GOLDS)(_gold)


def _predictions(text: str, *, first_match: bool = False) -> list[Any]:
    library = _library()
    mode = "first_match" if first_match else "any_match"
    readings: list[Any] = library.parse(text, library.answer_targets, extraction_mode=mode, parsing_timeout=None)
    return readings


def _compare(gold: _Gold, answers: list[Any], *, settled: bool) -> Grade:
    library = _library()
    try:
        right = library.verify(gold.readings, answers, PRECISION, timeout_seconds=None)
        return Grade(float(right), _extracted(gold, answers), settled)
    except library.errors:
        # An answer that cannot be converted to text, for example because it has too many digits, counts as wrong.
        return Grade(0.0, None, settled)


def _extracted(gold: _Gold, answers: list[Any]) -> str | None:
    written = [str(answer) for answer in answers]
    first = written[0] if written else None
    return next((text for text in written if text.strip() in gold.written), first)
