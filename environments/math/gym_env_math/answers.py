"""Answers: what of a text counts as one, and whether it equals the gold answer, decided by math-verify."""

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
    r"""The gold answer without blanks, `\( \)` or `$ $` around it."""
    gold = expected.strip()
    if len(gold) >= len(r"\(\)") and gold.startswith(r"\(") and gold.endswith(r"\)"):
        gold = gold[2:-2].strip()
    if len(gold) >= len("$$") and gold.startswith("$") and gold.endswith("$"):
        gold = gold[1:-1].strip()
    return gold


def boxed(content: str) -> str:
    r"""Give *content* in a `\boxed{}`."""
    return f"\\boxed{{{content}}}"


@offload(timeout=30.0, cpu=10.0, preload=["math_verify"])
def grade(gold: str, text: str, box: str | None, keep_gold: bool) -> Grade | None:
    """The grade of *text*, or `None` where math-verify reads nothing in the gold answer.

    *box* is the content that alone decides wherever it can be read (see `shortcut`).
    """
    known = _kept_gold(gold) if keep_gold else _gold(gold)
    if known is None:
        return None
    alone = _predictions(boxed(box), first_match=True) if box is not None else []
    # Two readings: the expression, and the text it was read from. One means the text could not be read.
    settled = len(alone) > 1
    return _compare(known, alone if settled else _predictions(text), settled=settled)


@offload(timeout=30.0, cpu=10.0, preload=["math_verify"])
def readable(gold: str) -> bool:
    """Whether math-verify can read the gold answer."""
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
    # No timeout of math-verify's own anywhere: it is a SIGALRM, and the worker has a deadline.
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
        # An answer that cannot even be written down, such as one of too many digits, is no answer.
        return Grade(0.0, None, settled)


def _extracted(gold: _Gold, answers: list[Any]) -> str | None:
    written = [str(answer) for answer in answers]
    first = written[0] if written else None
    return next((text for text in written if text.strip() in gold.written), first)
