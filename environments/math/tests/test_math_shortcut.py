from __future__ import annotations

import pytest

from gym_env_math.grading import Grade, GradeCache, compare_integers, find_only_box


@pytest.mark.parametrize(
    "text",
    [
        "\\boxed{5}",
        "so $\\boxed{5}$.",
        "\\[\n\\boxed{5}.\n\\]",
        "**\\(\\boxed{5}\\)**\n",
        "the final answer is $\\boxed{5}$.",
        "$x = 1$ is the final answer: $$\\boxed{5}$$",
        "\\frac{1}{2} of 10 is \\boxed{5}!",
    ],
)
def test_the_only_box_at_the_end_of_a_text_is_found(text: str):
    assert find_only_box(text) == "5"


@pytest.mark.parametrize(
    "text",
    [
        "5",
        "\\boxed{5} or \\boxed{6}",
        "\\fbox{4} \\boxed{5}",
        "\\boxed{\\boxed{5}}",
        "\\boxed{5} apples",
        "$\\boxed{5}$%",
        "\\boxed{5",
        "\\boxed 5",
        "\\boxed{a}b}",
        "\\boxed{$5$}",
        "\\boxed{x \\in [5}",
        "final answer is $x$, $\\boxed{5}$",
        "final answer is 3. I hope. \\boxed{5}",
    ],
)
def test_no_box_is_returned_if_other_text_may_count(text: str):
    assert find_only_box(text) is None


def test_nested_braces_belong_to_the_box():
    assert find_only_box("so $\\boxed{\\frac{1}{\\sqrt{2}}}$") == "\\frac{1}{\\sqrt{2}}"


@pytest.mark.parametrize(
    "tail", ["." * 90_000 + "x", "*" * 90_000 + "x", "\\boxed{" * 9_000, "$ " * 40_000, "{" * 90_000]
)
def test_malicious_texts_are_checked_in_linear_time(tail: str):
    assert find_only_box(f"final answer \\boxed{{5}}{tail}") is None


def test_a_very_long_text_is_graded_by_a_worker():
    assert find_only_box("x" * 200_000 + "\\boxed{5}") is None


def test_plain_integers_are_compared_directly():
    assert compare_integers("5", " 5 ") == Grade(1.0, "5", settled=True)
    assert compare_integers("-12", "12") == Grade(0.0, "12", settled=True)


@pytest.mark.parametrize(("gold", "box"), [("5", "05"), ("5", "5.0"), ("1000", "1,000"), ("x=5", "5"), ("0", "-0")])
def test_other_answers_are_not_compared_directly(gold: str, box: str):
    assert compare_integers(gold, box) is None


def test_a_settled_grade_is_cached_until_newer_grades_evict_it():
    cache = GradeCache(size=2)
    for box in ("1", "2"):
        cache.put("5", box, Grade(0.0, box, settled=True))
    cache.get("5", "1")
    cache.put("5", "3", Grade(0.0, "3", settled=True))
    assert [cache.get("5", box) is not None for box in ("1", "2", "3")] == [True, False, True]


def test_a_grade_that_is_not_settled_is_not_cached():
    cache = GradeCache()
    cache.put("5", "blah", Grade(0.0, None))
    cache.put("5", "9" * 5000, Grade(0.0, None, settled=True))
    cache.put("", "5", None)
    assert len(cache) == 0
