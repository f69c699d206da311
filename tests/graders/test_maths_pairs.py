"""Answers of many kinds, each with whether it is right: `maths_pairs.jsonl`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gymsdk.graders.maths import DIFFERENT, EQUAL, UNDECIDED, GoldUnreadable, grade

PAIRS = [json.loads(line) for line in (Path(__file__).parent / "maths_pairs.jsonl").read_text().splitlines()]
GROUPS = sorted({pair["group"] for pair in PAIRS})


def test_the_pairs_are_many_right_and_wrong_ones() -> None:
    assert min(sum(pair["right"] for pair in PAIRS), sum(not pair["right"] for pair in PAIRS)) >= 600


@pytest.mark.parametrize("group", GROUPS)
def test_right_answers_are_equal_and_wrong_ones_are_not(group: str) -> None:
    pairs = [pair for pair in PAIRS if pair["group"] == group]
    assert [pair for pair in pairs if (grade(pair["gold"], pair["reply"]).outcome == EQUAL) != pair["right"]] == []


@pytest.mark.parametrize(
    ("gold", "kind"),
    [
        (r"\frac{1}{2}", "number"),
        ("x^2+1", "expression"),
        (r"\infty", "infinity"),
        (r"\{1, 2\}", "set"),
        ("1, 2", "list"),
        ("(1, 2, 3)", "tuple"),
        (r"[1, \infty)", "set of reals"),
        ("x > 2", "assignment"),
        ("x = 5", "assignment"),
        ("2x + 3y = 7", "equation"),
        ("a < b < c", "relation"),
        ("(B)", "letter"),
        (r"\text{Monday}", "words"),
        ("1011_2", "base"),
        ("3:45", "time"),
        ("3:4", "ratio"),
        (r"\$18", "quantity"),
        (r"5\text{ cm}", "quantity"),
        (r"3 \pmod 7", "modulus"),
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", "matrix"),
        (r"\begin{cases} x & x > 0 \\ 0 & x \le 0 \end{cases}", "piecewise"),
        (r"A \cap B", "set expression"),
    ],
)
def test_an_expected_answer_has_a_kind(gold: str, kind: str) -> None:
    found = grade(gold, f"\\boxed{{{gold}}}")
    assert (found.kind, found.outcome, found.reason) == (kind, EQUAL, "")


@pytest.mark.parametrize(
    ("reply", "extracted", "reason"),
    [
        ("I cannot solve it.", None, "the reply gives no answer"),
        (r"\boxed{", None, "the reply gives no answer"),
        (r"\boxed{2 3}", None, "the answer cannot be read: '3' is not expected there"),
        (r"\boxed{\frac{2}{6}}", "1/3", "another value"),
        (r"\boxed{x}", "expression in x", "another value"),
        (r"\boxed{(1, 2)}", "(1, 2)", "number and tuple"),
        (r"\boxed{\int_0^1 x \, dx}", "expression", "the answer cannot be evaluated"),
        (r"\boxed{10^{10^{10^{10}}}}", "number", "only one has a value: an exponent is too large"),
    ],
)
def test_a_grade_says_why_the_answer_is_different(reply: str, extracted: str | None, reason: str) -> None:
    found = grade(r"\frac{1}{2}", reply)
    assert (found.outcome, found.reason) == (DIFFERENT, reason)
    assert (found.extracted is None) == (extracted is None)
    assert (found.extracted or "").startswith(extracted or "")


def test_enormous_numbers_that_differ_by_one_are_different_and_towers_are_undecided() -> None:
    assert grade("2^{3000000}", r"\boxed{8^{1000000}}").outcome == EQUAL
    assert grade("2^{3000000}", r"\boxed{8^{1000000}+1}").outcome == DIFFERENT
    assert grade("2^{2^{2^{2^{2^{2}}}}}", r"\boxed{3^{3^{3^{3^{3}}}}}").outcome == UNDECIDED


@pytest.mark.parametrize(
    ("gold", "reply"),
    [
        ("x > -1", r"\boxed{-2x + 16 < 18}"),
        ("(-1, 5)", r"\boxed{|x-2| < 3}"),
        ("x = 2", r"\boxed{2x + 3 = 7}"),
        ("2", r"\boxed{2x + 3 = 7}"),
        (r"\{2, 3\}", r"\boxed{x^2 - 5x + 6 = 0}"),
    ],
)
def test_a_problem_is_not_its_solution(gold: str, reply: str) -> None:
    assert grade(gold, reply).outcome == DIFFERENT


@pytest.mark.parametrize(
    "answer",
    [
        r"x = \int y \, dy",
        r"\int_0^1 t \, dt : 1",
        r"\{\int_0^1 x \, dx\}",
        r"\text{A. }\int x",
        r"k \pmod 7",
        r"\begin{pmatrix} \int x \, dx \end{pmatrix}",
        r"y = \lim x",
        "2^{2^{2^{2^{2^{2}}}}}",
    ],
)
@pytest.mark.parametrize("gold", ["17", r"\frac{3}{8}", "x = 5", "x^2 + 1", r"3 \pmod 7", r"\{1, 2\}", "y < 2x + 1"])
def test_a_reply_that_cannot_be_evaluated_is_different(gold: str, answer: str) -> None:
    assert grade(gold, f"\\boxed{{{answer}}}").outcome == DIFFERENT


def test_a_grade_without_mpmath_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from gymsdk.graders.maths import limits

    monkeypatch.setattr(limits, "_contexts", type(limits._contexts)())
    monkeypatch.setitem(__import__("sys").modules, "mpmath.ctx_mp", None)
    assert grade("1/2", r"\boxed{0.5}").outcome == EQUAL
    with pytest.raises(ImportError, match=r'pip install "gymsdk\[maths\]"'):
        grade("1/2", r"\boxed{\sin 1}")


def test_a_gold_without_a_value_is_refused() -> None:
    with pytest.raises(GoldUnreadable, match="division by zero"):
        grade(r"\frac{1}{0}", r"\boxed{0}")
