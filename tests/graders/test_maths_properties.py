"""Properties of the maths grader: equal after any rewriting, different after any change, symmetric, bounded."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gymsdk.graders.maths import EQUAL, GoldUnreadable, Grade, grade

from .maths_writing import Written, style, written

MACROS = (
    r"\frac", r"\sqrt", r"\{", r"\}", r"\text{", r"\boxed{", r"\pm", r"\infty", r"\begin{pmatrix}", r"\end{pmatrix}",
    r"\cup", r"\le", r"\sin", r"\log_", r"\sum_", r"\binom", "10^{", " or ",
)  # fmt: skip
ALPHABET = st.sampled_from([*"0123456789+-*/^_(){}[]|,.:;!%$&=<>xyzABnei ²½√π", *MACROS])
texts = st.one_of(st.text(max_size=200), st.lists(ALPHABET, max_size=60).map("".join))
MAX_CALLS = 500_000
"""Calls of Python functions for one grade. Every loop of the grader calls one, so this bounds the steps too."""


def box(answer: str) -> str:
    return f"We work it out.\n\nThe answer is $\\boxed{{{answer}}}$."


@given(written)
@settings(max_examples=300, deadline=None)
def test_another_way_to_write_a_value_is_equal_and_another_value_is_not_in_either_order(value: Written) -> None:
    same, other = grade(value.first, box(value.second)), grade(value.first, box(value.other))
    assert same.outcome == grade(value.second, box(value.first)).outcome == EQUAL
    assert other.outcome == grade(value.other, box(value.first)).outcome != EQUAL
    # Equal answers have one normal form. A name or a bracket may be left out: it is the same for answers of one kind.
    first = grade(value.first, box(value.first)).extracted
    assert first == same.extracted or {"(", "["} & set(str(first)) or "..." in str(first)
    assert first != other.extracted


@given(written, st.data())
@settings(max_examples=300, deadline=None)
def test_the_style_does_not_matter(value: Written, data: Any) -> None:
    assert grade(style(data.draw, value.first), box(style(data.draw, value.second))).outcome == EQUAL


def count_calls(gold: str, reply: str) -> int:
    """Return how many functions are called to grade *reply*."""
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        grade_or_refuse(gold, reply)
    finally:
        sys.setprofile(None)
    return calls


def grade_or_refuse(gold: str, reply: str) -> Grade | None:
    try:
        return grade(gold, reply)
    except GoldUnreadable:
        return None


@given(texts, texts)
@settings(max_examples=200, deadline=None)
@example("((((((((((" * 50, "\\boxed{" + "(" * 3000 + "}")
@example("2^{2^{2^{2^{2^{2}}}}}", "\\boxed{2^{2^{2^{2^{2^{2^2}}}}}}")
@example("5", "\\boxed{9999999!}")
@example("5", "\\boxed{" + "9" * 9000 + "}")
@example("5", "\\boxed{\\sin(10^{10^{10}})}")
@example("5", "\\boxed{\\binom{10^{20}}{10^{19}}}")
@example("x", "\\boxed{" + "9" * 5000 + "}")
@example("x^2", "\\boxed{" + "9" * 5000 + "x}")
@example("x+y=1", "\\boxed{x+y=" + "9" * 5000 + "}")
@example("a<b", "\\boxed{a<" + "9" * 5000 + "}")
@example("5", "#" * 60)
@example("5", "Result is 17\n" + "*" * 60)
@example("5", "\\boxed{no °no °}")
@example("5", "\\boxed{2 weeks°}")
@example("5", "\\boxed{\\text{a}°\\text{a}°}")
@example("5", "\\boxed{" + "A." * 1000 + "}")
@example("5", "\\boxed{\\sum_{k=1}^{500}\\frac{1}{3^{200000}+k}}")
@example("5", "\\boxed{\\sum_{k=1}^{500}\\sqrt{3^{200000}+k}}")
@example("5", "\\boxed{\\sum_{k=1}^{500}\\frac{1}{20000!+k}}")
@example("5", "\\boxed{\\sum_{k=1}^{200}\\sqrt{3^{200000}+k}}")
@example("5", "\\boxed{\\sum_{k=1}^{200}\\sum_{j=1}^{200}kj}")
@example("5", "\\boxed{" + "1+" * 3000 + "1}")
@example("5", "\\boxed{" + "\\pm 1 " * 300 + "}")
@example("5", "\\boxed{" * 500 + "5" + "}" * 500)
@example("\\{" + ",".join(map(str, range(300))) + "\\}", "\\boxed{\\{" + ",".join(map(str, range(1, 301))) + "\\}}")
@example("(x+1)^{1000000}", "\\boxed{(x+1)^{1000001}}")
@example("5", "\\boxed{e^{e^{e^{e^{e}}}}}")
def test_any_text_is_graded_in_a_bounded_number_of_steps(gold: str, reply: str) -> None:
    assert count_calls(gold, reply) <= MAX_CALLS + 60 * (len(gold) + len(reply))
    assert grade_or_refuse(gold, reply) == grade_or_refuse(gold, reply)
    boxed = grade_or_refuse(gold, f"\\boxed{{{gold}}}")
    assert boxed is None or isinstance(boxed, Grade)


MACRO_TOKENS = [r"\boxed{", r"\text{", r"\,", r"\(", r"\pm", r"\frac"]
TOKENS = (*" \n.,:;!?#*_`$%^&|/\\(){}[]<>=+-0aA√°²'", *MACRO_TOKENS, "or", "the ", "answer", "is ")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_repetition_makes_the_grader_hang() -> None:
    repeated = [(first + second) * (1500 // len(first + second)) for first in TOKENS for second in ("", *TOKENS)]
    for text in repeated:
        for form in ("{}", "Result is 17\n{}", r"\boxed{{{}}}", r"\boxed{{5}}{}\boxed{{6}}", "The answer is {}x"):
            grade_or_refuse("5", form.format(text))


@pytest.mark.parametrize("gold", ["", "  ", "$$", "\\boxed{}", "\\frac{1}{", "2 3", "=", "1/0x", "\\foo{3}"])
def test_an_expected_answer_that_cannot_be_read_is_refused(gold: str) -> None:
    with pytest.raises(GoldUnreadable, match="expected answer"):
        grade(gold, "\\boxed{5}")
