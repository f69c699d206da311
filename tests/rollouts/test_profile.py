from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from gymsdk.line import StoredRollout
from gymsdk.rollouts.profile import Profile, build_histogram, build_profile

Groups = Sequence[Sequence[float]]


def _lines(groups: Groups) -> list[dict[str, Any]]:
    return [
        {
            "_ng_task_index": task,
            "_ng_rollout_index": repeat,
            "reward": reward,
            "gymsdk": {
                "turns": 2,
                "usage": {"policy": {"output_tokens": 15, "calls": 3}},
                "timing": {"stages": {"verify": float(task + 1)}},
            },
        }
        for task, rewards in enumerate(groups)
        for repeat, reward in enumerate(rewards)
    ]


def _profile(groups: Groups, *, failed: int = 0, maxima: dict[int, float] | None = None) -> Profile:
    failures = [{"_ng_failure_class": "tool_raised"}] * failed
    rollouts = map(StoredRollout, [*_lines(groups), *failures])
    return build_profile("sums", "scripted/oracle", rollouts, maxima=maxima)


def test_a_profile_has_the_figures_of_its_groups() -> None:
    profile = _profile([[0, 0], [0, 2], [2, 2], [1, 1]], maxima={0: 2.0, 1: 2.0, 2: 2.0, 3: 1.0})
    assert profile.bands == {"always wrong": 1, "hard": 0, "medium": 1, "easy": 0, "always right": 2}
    assert (profile.maximum, profile.flat, profile.tokens, profile.turns) == (2.0, 0.75, 5.0, 2.0)
    assert sum(bar.count for bar in profile.rewards) == 8
    grading = _profile([[1]] * 101).grading
    assert (grading["p50"], grading["p99"]) == (51.0, 100.0)


@pytest.mark.parametrize("step", ["0.05", "0.1", "0.2", "0.01"])
@pytest.mark.parametrize(("low", "high"), [("0", "1"), ("-1", "1"), ("-0.3", "0.7"), ("0", "3"), ("0.5", "2.5")])
def test_a_multiple_of_the_step_is_in_the_bin_that_fractions_give(low: str, high: str, step: str) -> None:
    first, last = Fraction(low), Fraction(high)
    values = [first + number * Fraction(step) for number in range(int((last - first) / Fraction(step)) + 1)]
    bars = build_histogram(map(float, values))
    expected = Counter(min(int((value - first) / (last - first) * 10), 9) for value in values)
    assert [bar.count for bar in bars] == [expected[number] for number in range(10)]
    edges = [float(first + (last - first) * number / 10) for number in range(11)]
    assert [(bar.low, bar.high) for bar in bars] == list(pairwise(edges))


@pytest.mark.parametrize("maximum", ["1", "0.3", "0.6", "0.9", "1.5", "3", "10"])
@pytest.mark.parametrize("repeats", [1, 2, 3, 6])
def test_a_task_is_in_the_band_that_fractions_give(maximum: str, repeats: int) -> None:
    for number in range(1, 30):
        share = Fraction(number, 30)
        rewards = [float(share * Fraction(maximum))] * repeats
        expected = "hard" if share < Fraction(1, 3) else "medium" if share <= Fraction(2, 3) else "easy"
        bands = _profile([rewards], maxima={0: float(maximum)}).bands
        if Fraction(str(rewards[0])) == share * Fraction(maximum):
            assert bands[expected] == 1, (number, rewards)


@pytest.mark.parametrize(
    ("groups", "failed", "verdict"),
    [
        ([], 3, "No rollout was scored: correct the failures first."),
        ([[0, 1]] * 10, 5, "5 of 25 rollouts have no reward: correct the failures before training."),
        ([[0, 0]] * 9 + [[0, 1]], 0, "Too hard for this model: most tasks are never solved."),
        ([[1, 1]] * 9 + [[0, 1]], 0, "Too easy for this model: most tasks are always solved."),
        ([[0], [1]], 0, "Play each task several times (-k 8) to see whether its rollouts differ."),
        (
            [[0, 0]] * 4 + [[1, 1]] * 4 + [[0, 1]] * 2,
            0,
            "Thin signal: only 20% of 10 groups differ within themselves; filter tasks by difficulty.",
        ),
        ([[0, 1]] * 6 + [[1, 1]] * 4, 0, "Ready to train: 60% of 10 groups differ within themselves."),
    ],
)
def test_the_verdict_on_a_run_names_the_problem(groups: Groups, failed: int, verdict: str) -> None:
    assert _profile(groups, failed=failed).verdict == verdict


@pytest.mark.slow
@pytest.mark.parametrize("groups", [[], [[1.0]], [[0.0, 1.0] * 4] * 3, [[-5.0, 40.0]], [[0.5]] * 40, [[0.0] * 30]])
def test_every_profile_can_be_drawn(tmp_path: Path, groups: Groups) -> None:
    pytest.importorskip("matplotlib")
    from gymsdk.rollouts.profile import draw_profile

    draw_profile(_profile(groups), tmp_path / "profile.png")
    assert (tmp_path / "profile.png").read_bytes().startswith(b"\x89PNG")
