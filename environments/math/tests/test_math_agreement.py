from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from math_corpus import mixed_pairs, pairs
from math_direct import Graded, Result, direct_all, grade_in_all_ways

from gym_env_math.grading import find_only_box

CORPUS = pairs()


class Processes(NamedTuple):
    """A process with the environment's grader, and a process with the unchanged math-verify."""

    library: ProcessPoolExecutor
    unchanged: ProcessPoolExecutor

    def compare(self, pairs: list[tuple[str, str]]) -> list[tuple[Result, Graded]]:
        expected, graded = self.unchanged.submit(direct_all, pairs), self.library.submit(grade_in_all_ways, pairs)
        return list(zip(expected.result(), graded.result(), strict=True))


@pytest.fixture(scope="session")
def processes(library: ProcessPoolExecutor, unchanged_library: ProcessPoolExecutor) -> Processes:
    return Processes(library, unchanged_library)


@pytest.fixture(scope="module")
def comparisons(processes: Processes) -> list[tuple[Result, Graded]]:
    return processes.compare(CORPUS)


def results_agree(expected: Result, graded: Graded) -> bool:
    # If math-verify cannot read the expected answer, it raises. NeMo Gym counts this as (0.0, None).
    ways = [(0.0, None) if way is None else way[:2] for way in (graded.plain, graded.by_box)]
    return all(way == expected for way in ways) and (graded.whole is None or graded.whole[:2] == expected)


def find_differences(
    pairs: list[tuple[str, str]], comparisons: list[tuple[Result, Graded]]
) -> list[tuple[tuple[str, str], Result, Graded]]:
    return [(pair, *each) for pair, each in zip(pairs, comparisons, strict=True) if not results_agree(*each)]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_grade_equals_the_grade_of_math_verify(comparisons: list[tuple[Result, Graded]]):
    assert len(CORPUS) >= 500
    assert find_differences(CORPUS, comparisons) == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_grades_of_similar_and_different_answers_equal_the_grades_of_math_verify(processes: Processes):
    mixed = mixed_pairs(3000)
    comparisons = processes.compare(mixed)
    assert find_differences(mixed, comparisons) == []
    rewards = [reward for (reward, _), _ in comparisons]
    assert min(rewards.count(1.0), rewards.count(0.0)) >= 500


@pytest.mark.slow
def test_the_corpus_has_many_right_and_wrong_answers_settled_by_the_box(comparisons: list[tuple[Result, Graded]]):
    settled = [each.by_box.reward for _, each in comparisons if each.by_box and each.by_box.settled]
    assert min(settled.count(1.0), settled.count(0.0)) >= 50


@pytest.mark.slow
def test_the_corpus_has_right_and_wrong_integers(comparisons: list[tuple[Result, Graded]]):
    whole = [each.whole.reward for _, each in comparisons if each.whole]
    assert min(whole.count(1.0), whole.count(0.0)) >= 5


HEADS = [
    "", "So ", "final answer is ", "Final Answer: it is ", "final answer. Then $x=3$ and so ", "final answer is $x$, ",
    "Final answer is $3$ and ", "answer: 7 so ", "\\(x\\) is ", "\\[y\\] ", "$ and ", "\\[ a ", "\\( b", " [c ", "5",
    "\\", "$", "$$", "is ", "final answer is [1,2] and ", "or ", ", ", "I hope ", "final answer is 3. I hope ", "\n",
    "= ", "3/4 ", "\\frac{1}{2} ", "%", "{", "}",
]  # fmt: skip
PAIRS = [
    ("", ""), ("$", "$"), ("$$", "$$"), ("\\[", "\\]"), ("\\(", "\\)"), ("\\[\n", "\n\\]"), (" [", "] "), ("5$", "$"),
    ("$ ", " $"), ("\\$", "\\$"), ("\\[", "$"), ("", "\\]"), ("$", ".$"), ("$", ""),
]  # fmt: skip
BOXES = [
    "5", "-5", "05", " 12 ", "1,234", "\\frac{1}{2}", "\\{1,2\\}", "[1,2)", " [1,2]", "x=5", "x is 5", "5\\%", "5 m",
    "3.50", "\\text{yes}", "blah 5", "2 \\text{ or } 3", "final answer is 5", "{", "a}b", "\\frac{1}{2", "(1,2)", "5%",
    "f(x)=2x", "5 percent", "\\left[1,2\\right]", "2\\\\(3)", "x \\in [3", "1.", "$5$", "\\(5\\)", "is $3$", "5\n",
    "\\boxed{5}", "5} \\boxed{6", "x is [1,2] ",
]  # fmt: skip
TAILS = ["", ".", "\n", "**", "!", " I hope it is", " %", "percent", "\\%", " and $3$", "5", " .", "}", " .\n"]
GOLDS = ["5", "-5", "12", "\\frac{1}{2}", "\\{1,2\\}", "[1,2)", "x=5", "5\\%", "3.5", "yes", "\\{2,3\\}", "0"]


@pytest.mark.slow
@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    heads=st.lists(st.sampled_from(HEADS), max_size=4),
    pair=st.sampled_from(PAIRS),
    box=st.sampled_from(BOXES) | st.integers(-300, 300).map(str),
    tail=st.sampled_from(TAILS),
    gold=st.none() | st.sampled_from(GOLDS),
)
def test_the_shortcut_agrees_with_math_verify(
    processes: Processes, heads: list[str], pair: tuple[str, str], box: str, tail: str, gold: str | None
):
    text = f"{''.join(heads)}{pair[0]}\\boxed{{{box}}}{pair[1]}{tail}"
    assume(find_only_box(text) is not None)
    pairs = [(box if gold is None else gold, text)]
    assert find_differences(pairs, processes.compare(pairs)) == []


@pytest.mark.slow
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(text=st.text(alphabet="$\\()[]{}5xyz =.,%-/^_\n", max_size=40), gold=st.sampled_from(GOLDS))
def test_any_text_in_and_around_a_box_gets_the_grade_of_math_verify(processes: Processes, text: str, gold: str):
    middle = len(text) // 2
    pairs = [(gold, f"{text[:middle]}\\boxed{{{text[middle:]}}}")]
    assert find_differences(pairs, processes.compare(pairs)) == []
