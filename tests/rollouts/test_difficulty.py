"""What repeats say about the difficulty of tasks."""

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
def test_an_interval_holds_its_mean_and_stays_within_the_possible(values):
    found = compute_interval(values)
    assert 0 <= found.low <= found.value <= found.high <= 1
    assert found.value == pytest.approx(statistics.fmean(values))


def test_the_interval_of_single_rollouts_is_wilsons():
    found = compute_interval([1.0] * 7 + [0.0] * 3)
    assert (found.low, found.high) == pytest.approx((0.397, 0.892), abs=0.02)


def test_tasks_that_all_fail_still_leave_doubt():
    found = compute_interval([0.0] * 20, observations=160)
    assert found.low == 0
    assert found.high == pytest.approx(0.161, abs=0.001)


def test_repeats_do_not_make_few_tasks_look_like_many():
    few = compute_interval([1.0, 0.0] * 5, observations=1_000)
    assert few.high - few.low > 0.4


def test_more_rollouts_per_task_narrow_what_one_task_says():
    assert compute_interval([0.5], observations=100).high < compute_interval([0.5], observations=10).high
    assert compute_interval([0.0], observations=100).high < compute_interval([0.0], observations=10).high


def test_rewards_beyond_zero_and_one_have_the_normal_interval():
    found = compute_interval([-2.0, 0.0, 2.0, 4.0])
    half = 1.96 * statistics.stdev([-2, 0, 2, 4]) / 2
    assert (found.low, found.high) == pytest.approx((1 - half, 1 + half), rel=1e-3)


def test_a_wider_confidence_has_a_wider_interval():
    values = [1.0, 0.0, 1.0, 0.5]
    assert compute_interval(values, confidence=0.99).high > compute_interval(values, confidence=0.9).high


def test_nineteen_of_twenty_intervals_hold_the_truth():
    rng = Random(0)
    held = 0
    for _ in range(400):
        chances = [rng.betavariate(0.6, 0.9) for _ in range(40)]
        values = [statistics.fmean(rng.random() < chance for _ in range(8)) for chance in chances]
        found = compute_interval(values, observations=320)
        held += found.low <= 0.4 <= found.high
    assert held / 400 == pytest.approx(0.95, abs=0.03)


def test_pass_intervals_agree_with_the_aggregate_at_every_k():
    found = rollouts([[1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 0, 1], [0, 1]])
    figures = aggregate(found)
    estimates = compute_pass_intervals(found)
    assert list(estimates) == [1, 2, 3, 4]
    for k, estimate in estimates.items():
        assert 100 * estimate.value == pytest.approx(figures[f"pass@{k}/accuracy"])
        assert estimate.low < estimate.value < estimate.high


def test_no_rollouts_have_no_intervals():
    assert compute_pass_intervals([]) == {}


def test_groups_that_agree_are_counted_and_single_rollouts_are_not():
    assert compute_zero_variance_share(rollouts([[1, 1], [0, 0], [1, 0], [1]])) == pytest.approx(2 / 3)


def test_without_repeats_nothing_is_known_of_variance():
    assert compute_zero_variance_share(rollouts([[1], [0]])) is None


def test_a_histogram_puts_a_value_on_an_edge_into_the_upper_bin_and_one_into_the_last():
    found = build_histogram([0.0, 0.3, 0.7, 0.95, 1.0])
    assert [each.count for each in found] == [1, 0, 0, 1, 0, 0, 0, 1, 0, 2]
    assert (found[0].low, found[-1].high) == (0.0, 1.0)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.integers(1, 20))
def test_a_histogram_loses_no_value(values, bins):
    assert sum(each.count for each in build_histogram(values, bins=bins)) == len(values)


def test_a_histogram_of_values_beyond_spans_them():
    found = build_histogram([-2.0, 0.0, 2.0], bins=2)
    assert found == [Bin(-2.0, 0.0, 1), Bin(0.0, 2.0, 2)]


def test_values_all_alike_beyond_one_share_a_bin():
    assert build_histogram([5.0, 5.0]) == [Bin(5.0, 5.0, 2)]
    assert build_histogram([]) == []


def test_bands_tell_hopeless_from_hard_and_easy_from_done():
    found = count_bands(rollouts([[0, 0], [0, 0, 0, 1], [0, 1], [1, 1, 1, 0], [1, 1], [0.4, 0.4]]))
    assert found == {"always wrong": 1, "hard": 1, "medium": 2, "easy": 1, "always right": 1}


def test_bands_are_measured_against_the_best_reward():
    found = count_bands(rollouts([[2, 2], [1, 1], [1, 1], [0, -1]]), maxima={0: 2.0, 1: 2.0, 3: 0.5})
    assert found == {"always wrong": 1, "hard": 0, "medium": 1, "easy": 0, "always right": 2}


def test_a_task_that_claims_no_reward_is_in_a_band_too():
    assert count_bands(rollouts([[1, -1]]), maxima={0: 0.0})["always wrong"] == 1
