r"""Grade answers to maths problems: compare the answer in a reply with the expected one.

    >>> from gymsdk.graders.maths import grade
    >>> grade(r"\frac{1}{2}", r"So the probability is \boxed{0.5}.").outcome
    'equal'

Numbers are compared exactly if they are rational, else to 60 digits relative to their size; expressions at random
points that depend on the answers. `docs/maths-grading.md` lists what counts as equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from gymsdk.graders.maths.comparison import compare
from gymsdk.graders.maths.description import describe
from gymsdk.graders.maths.equality import DIFFERENT, EQUAL, UNDECIDED, Outcome
from gymsdk.graders.maths.extraction import Found, find_answer
from gymsdk.graders.maths.kinds import Answer, Collection, Scalar
from gymsdk.graders.maths.lexer import Unreadable
from gymsdk.graders.maths.limits import PRECISIONS, TooLarge, Undecidable, Undefined
from gymsdk.graders.maths.parser import INFINITY, Node
from gymsdk.graders.maths.reading import read_answer
from gymsdk.graders.maths.values import EXPRESSIONS, Evaluation, find_variables

__all__ = ["DIFFERENT", "EQUAL", "GRADER", "UNDECIDED", "GoldUnreadable", "Grade", "Outcome", "Unreadable", "grade"]

GRADER = "gymsdk.graders.maths/1"
"""The name and version of the grader. A version that can grade an answer differently has another number."""

MAX_CACHED_GOLDS = 2048


class GoldUnreadable(ValueError):
    """The expected answer cannot be read, so no reply can be graded."""


class Grade(NamedTuple):
    """The grade of a reply.

    Attributes:
        outcome: `equal`, `different` or `undecided`.
        kind: The kind of the expected answer: `number`, `expression`, `set`, `letter` and so on.
        extracted: The answer of the reply in a normal form, which is the same for equal answers of one kind; `None` if
            the reply gives no answer that can be read.
        found: The answer as the reply writes it, or `None` if it gives none.
        reason: Why the outcome is not `equal`; else empty.
    """

    outcome: Outcome
    kind: str
    extracted: str | None
    found: str | None
    reason: str = ""


def grade(gold: str, reply: str) -> Grade:
    r"""Compare the answer that a reply gives with the expected answer.

    Args:
        gold: The expected answer, as LaTeX or plain text, with or without delimiters or a `\boxed{}`.
        reply: The text of the policy.

    Returns:
        The grade. A reply without a readable answer is `different`. `undecided` means that the grader can read both
        answers but cannot compare them: too many digits cancel, or both numbers are too large.

    Raises:
        GoldUnreadable: The expected answer cannot be read.
    """
    expected = read_gold(gold)
    found = find_answer(reply)
    if found is None:
        return Grade(DIFFERENT, expected.kind, None, None, "the reply gives no answer")
    try:
        answer = _read_found(found)
    except Unreadable as error:
        return Grade(DIFFERENT, expected.kind, None, found.text, f"the answer cannot be read: {error}")
    comparison = compare(expected, answer)
    if comparison.outcome != EQUAL and len(found.others) > 1 and _has_parts(expected, len(found.others)):
        together = _read_together(found.others)
        if together is not None and compare(expected, together).outcome == EQUAL:
            answer, comparison = together, compare(expected, together)
    if comparison.outcome == UNDECIDED and _can_be_evaluated(expected) and not _can_be_evaluated(answer):
        return Grade(DIFFERENT, expected.kind, describe(answer), found.text, "the answer cannot be evaluated")
    return Grade(comparison.outcome, expected.kind, describe(answer), found.text, comparison.reason)


def _read_found(found: Found) -> Answer:
    try:
        return read_answer(found.text)
    except Unreadable:
        if found.box is None:
            raise
        return read_answer(found.box)


@lru_cache(maxsize=MAX_CACHED_GOLDS)
def read_gold(gold: str) -> Answer:
    r"""Read an expected answer. In a text with a box, it is the content of the last box.

    Raises:
        GoldUnreadable: It cannot be read.
    """
    text = gold
    if "\\boxed" in gold or "\\fbox" in gold or "####" in gold:
        found = find_answer(gold)
        text = gold if found is None else found.text
    try:
        answer = read_answer(text)
        _check_value(answer)
    except (Unreadable, Undefined) as error:
        raise GoldUnreadable(f"the expected answer {gold[:200]!r} cannot be read: {error}") from error
    return answer


def _check_value(answer: Answer) -> None:
    """Raise `Undefined` if an expression has no value at all, as after a division by zero."""
    if isinstance(answer, Scalar) and answer.kind != "infinity":
        with suppress(TooLarge, Undecidable):
            _evaluate(answer.node)


def _evaluate(node: Node) -> None:
    """Evaluate an expression at one point, for the error that this raises."""
    point = {name: Fraction(number, 7) for number, name in enumerate(sorted(find_variables(node)), 11)}
    Evaluation(PRECISIONS[0], point).evaluate(node)


def _has_parts(expected: Answer, count: int) -> bool:
    return isinstance(expected, Collection) and expected.kind != "tuple" and len(expected.items) == count


def _read_together(boxes: tuple[str, ...]) -> Answer | None:
    try:
        return read_answer(", ".join(boxes))
    except Unreadable:
        return None


def _can_be_evaluated(answer: Answer) -> bool:
    """Return whether all expressions in an answer have a value, or none, at a point."""
    for node in _iter_expressions(answer):
        try:
            _evaluate(node)
        except (TooLarge, Undecidable):
            return False
        except Undefined:
            continue
    return True


def _iter_expressions(value: object) -> Iterator[Node]:
    """Yield the expressions in an answer, however deep its parts are nested."""
    if not isinstance(value, tuple):
        return
    if not hasattr(value, "_fields") and value and value[0] in EXPRESSIONS and value != INFINITY:
        yield value
        return
    for part in value:
        yield from _iter_expressions(part)
