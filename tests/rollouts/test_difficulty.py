"""The difficulty of tasks, from the rewards of repeats."""

from __future__ import annotations

import statistics
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gymsdk.metrics import ScoredRollout, aggregate
from gymsdk.rollouts.profile import (
    Bin,
    build_histogram,
    compute_interval,
    compute_pass_intervals,
    compute_zero_variance_share,
    count_bands,
)


def rollouts(tasks: list[list[float]]) -> list[ScoredRollout]:
    return [
        ScoredRollout(task, repeat, reward)
        for task, rewards in enumerate(tasks)
        for repeat, reward in enumerate(rewards)
    ]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30))
def test_an_interval_contains_its_mean_and_stays_within_zero_and_one(values):
    result = compute_interval(values)
    assert 0 <= result.low <= result.value <= result.high <= 1
    assert result.value == pytest.approx(statistics.fmean(values))


def test_the_interval_of_single_rollouts_is_wilsons_and_normal_outside_zero_and_one():
    result = compute_interval([1.0] * 7 + [0.0] * 3)
    assert (result.low, result.high) == pytest.approx((0.397, 0.892), abs=0.02)
    result = compute_interval([0.0] * 20, observations=160)
    assert (result.low, result.high) == (0, pytest.approx(0.161, abs=0.001))
    result = compute_interval([-2.0, 0.0, 2.0, 4.0])
    half = 1.96 * statistics.stdev([-2, 0, 2, 4]) / 2
    assert (result.low, result.high) == pytest.approx((1 - half, 1 + half), rel=1e-3)


def test_more_rollouts_per_task_narrow_the_interval_of_one_task_and_not_that_of_few():
    for value in (0.5, 0.0):
        assert compute_interval([value], observations=100).high < compute_interval([value], observations=10).high
    few = compute_interval([1.0, 0.0] * 5, observations=1_000)
    assert few.high - few.low > 0.4
    values = [1.0, 0.0, 1.0, 0.5]
    assert compute_interval(values, confidence=0.99).high > compute_interval(values, confidence=0.9).high


def test_about_nineteen_of_twenty_intervals_contain_the_true_mean():
    rng = Random(0)
    covered = 0
    for _ in range(400):
        chances = [rng.betavariate(0.6, 0.9) for _ in range(40)]
        values = [statistics.fmean(rng.random() < chance for _ in range(8)) for chance in chances]
        result = compute_interval(values, observations=320)
        covered += result.low <= 0.4 <= result.high
    assert covered / 400 == pytest.approx(0.95, abs=0.03)


def test_pass_intervals_agree_with_the_aggregate_at_every_k():
    result = rollouts([[1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 0, 1], [0, 1]])
    figures = aggregate(result)
    estimates = compute_pass_intervals(result)
    assert list(estimates) == [1, 2, 3, 4]
    for k, estimate in estimates.items():
        assert 100 * estimate.value == pytest.approx(figures[f"pass@{k}/accuracy"])
        assert estimate.low < estimate.value < estimate.high


def test_the_zero_variance_share_counts_only_tasks_with_repeats():
    assert compute_zero_variance_share(rollouts([[1, 1], [0, 0], [1, 0], [1]])) == pytest.approx(2 / 3)
    assert compute_zero_variance_share(rollouts([[1], [0]])) is None
    assert compute_pass_intervals([]) == {}


def test_a_histogram_puts_an_edge_value_into_the_upper_bin_and_one_into_the_last():
    result = build_histogram([0.0, 0.3, 0.7, 0.95, 1.0])
    assert [bar.count for bar in result] == [1, 0, 0, 1, 0, 0, 0, 1, 0, 2]
    assert (result[0].low, result[-1].high) == (0.0, 1.0)


def test_a_histogram_spans_values_outside_zero_and_one():
    result = build_histogram([-2.0, 0.0, 2.0], bins=2)
    assert result == [Bin(-2.0, 0.0, 1), Bin(0.0, 2.0, 2)]
    assert build_histogram([5.0, 5.0]) == [Bin(5.0, 5.0, 2)]
    assert build_histogram([]) == []


def test_bands_separate_tasks_by_their_share_of_right_rollouts():
    result = count_bands(rollouts([[0, 0], [0, 0, 0, 1], [0, 1], [1, 1, 1, 0], [1, 1], [0.4, 0.4]]))
    assert result == {"always wrong": 1, "hard": 1, "medium": 2, "easy": 1, "always right": 1}
