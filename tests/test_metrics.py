"""Metrics over scored rollouts, compared with hand-made examples and with exhaustive enumeration."""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gymsdk.line import StoredRollout
from gymsdk.metrics import (
    ScoredRollout,
    aggregate,
    average_by_run,
    compute_majority_curve,
    compute_pass_curve,
    compute_vote_curve,
    group_by_task,
    parse_scored_rollout,
    select_numbers,
    stderr,
    summarize_fields,
    summarize_tasks,
)

REWARDS = st.lists(st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=6), min_size=1, max_size=5)


def rollouts(tasks: list[list[float]], answers: list[list[str | None]] | None = None) -> list[ScoredRollout]:
    return [
        ScoredRollout(task, repeat, reward, answer=answers[task][repeat] if answers else None)
        for task, rewards in enumerate(tasks)
        for repeat, reward in enumerate(rewards)
    ]


@given(st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=8))
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_answer(rewards):
    subsets = [list(combinations(rewards, k)) for k in range(1, len(rewards) + 1)]
    assert compute_pass_curve(rewards) == pytest.approx([statistics.fmean(map(max, subset)) for subset in subsets])


def test_pass_at_k_of_graded_rewards_is_the_best_of_the_first_k():
    assert compute_pass_curve([0.2, 0.1, 0.7, 0.5]) == [0.2, 0.2, 0.7, 0.7]


def test_pass_at_k_is_in_percent_and_skips_tasks_with_fewer_rollouts():
    figures = aggregate(rollouts([[1, 0, 0], [0, 0], [1]]))
    assert figures["pass@1/accuracy"] == pytest.approx(100 * (1 / 3 + 0 + 1) / 3)
    assert figures["pass@2/accuracy"] == pytest.approx(100 * (2 / 3 + 0) / 2)
    assert figures["pass@3/accuracy"] == pytest.approx(100)
    assert "pass@4/accuracy" not in figures
    assert not [name for name in figures if "majority" in name or "vote" in name or "no_answer" in name]


def test_the_average_of_k_uses_all_rollouts_of_a_shorter_task():
    figures = aggregate(rollouts([[1, 0, 1], [0, 1], [1]]))
    assert figures["pass@1[avg-of-1]/accuracy"] == pytest.approx(100 * 2 / 3)
    assert figures["pass@1[avg-of-2]/accuracy"] == pytest.approx(100 * (0.5 + 0.5 + 1) / 3)
    assert figures["pass@1[avg-of-3]/accuracy"] == pytest.approx(100 * (2 / 3 + 0.5 + 1) / 3)


@pytest.mark.slow
@given(REWARDS)
def test_the_deviation_across_runs_is_the_deviation_of_the_run_means(tasks):
    found = rollouts(tasks)
    figures, means = aggregate(found), average_by_run(group_by_task(found), "accuracy")
    for k in range(2, len(means) + 1):
        deviation = statistics.stdev(means[:k])
        assert figures[f"pass@1[avg-of-{k}]/accuracy/std_dev_across_runs"] == pytest.approx(deviation, abs=1e-9)
        error = deviation / math.sqrt(k)
        assert figures[f"pass@1[avg-of-{k}]/accuracy/std_err_across_runs"] == pytest.approx(error, abs=1e-9)


def test_one_rollout_has_metrics_but_no_deviation():
    means = {f"{name}/reward": 0.5 for name in ("mean", "max", "min", "median")}
    deviations = {"std/reward": 0.0, "stderr/reward": 0.0}
    rates = {"pass@1/accuracy": 50.0, "pass@1[avg-of-1]/accuracy": 50.0}
    assert aggregate(rollouts([[0.5]])) == means | deviations | rates
    assert (aggregate([]), summarize_tasks([]), stderr([])) == ({}, [], 0.0)


@given(
    st.lists(st.tuples(st.sampled_from(["a", "b", "c", None]), st.sampled_from([0.0, 0.5, 1.0])), min_size=1),
)
def test_majority_is_the_mean_score_of_the_most_frequent_votes(votes):
    for k, found in enumerate(compute_majority_curve(votes), 1):
        counts = Counter(vote for vote in votes[:k] if vote[0] is not None)
        tied = [score for (_, score), count in counts.items() if count == max(counts.values())]
        assert found == pytest.approx(statistics.fmean(tied) if tied else 0.0)


@given(
    st.lists(
        st.tuples(st.sampled_from(["a", "b", "c", None]), st.sampled_from([0.0, 0.1, 0.5, 1.0, -2.0])), min_size=1
    ),
)
def test_a_vote_is_the_mean_score_of_the_rollouts_with_the_most_frequent_answer(votes):
    for k, found in enumerate(compute_vote_curve(votes), 1):
        scores: dict[str, list[float]] = {}
        for answer, score in votes[:k]:
            if answer is not None:
                scores.setdefault(answer, []).append(score)
        longest = max(map(len, scores.values()), default=0)
        means = [statistics.fmean(voted) for voted in scores.values() if len(voted) == longest]
        assert found == pytest.approx(statistics.fmean(means) if means else 0.0)


def test_a_vote_counts_answers_and_a_majority_counts_pairs_of_answer_and_score():
    # Three rollouts answer "x", and one of them is right. No pair of answer and score is more frequent than ("y", 1).
    answers = [["x", "x", "x", "y", "y"]]
    figures = aggregate(rollouts([[1, 0, 0.5, 1, 1]], answers), answers=True)
    assert figures["majority@5/accuracy"] == pytest.approx(100)
    assert figures["vote@5/accuracy"] == pytest.approx(100 * (1 + 0 + 0.5) / 3)
    assert figures["vote@4/accuracy"] == pytest.approx(50)
    assert figures["vote@1/accuracy"] == 100


def test_votes_over_tasks_with_ties_missing_answers_and_different_numbers_of_rollouts():
    answers = [["x", "y", "y"], [None, "z"], [None]]
    figures = aggregate(rollouts([[1, 0, 0.5], [0, 1], [1]], answers), answers=True)
    assert figures["vote@1/accuracy"] == pytest.approx(100 * (1 + 0 + 0) / 3)
    assert figures["vote@2/accuracy"] == pytest.approx(100 * ((1 + 0) / 2 + 1 + 0) / 3)
    assert figures["vote@3/accuracy"] == pytest.approx(100 * (0.25 + 1 + 0) / 3)
    assert "vote@4/accuracy" not in figures


def test_without_any_answer_majority_is_zero_and_the_no_answer_rate_is_one():
    figures = aggregate(rollouts([[1, 1], [0, 1]]), answers=True)
    assert figures["majority@2/accuracy"] == 0
    assert figures["pass@1/no_answer"] == 100
    assert figures["pass@1[avg-of-2]/no_answer"] == 100


def test_a_field_can_be_a_score_and_tasks_without_the_field_are_excluded():
    found = [
        ScoredRollout(0, 0, 1.0, {"library_reward": 0.0}),
        ScoredRollout(0, 1, 1.0, {"library_reward": 1.0}),
        ScoredRollout(1, 0, 1.0),
    ]
    figures = aggregate(found, scores=["accuracy", "library_reward"], answers=True)
    assert figures["pass@1/library_reward"] == 50
    assert figures["pass@2/library_reward"] == 100
    assert figures["pass@1/accuracy"] == 100


def test_field_statistics_exclude_missing_and_non_finite_values():
    found = [
        ScoredRollout(0, 0, 1.0, {"tokens": 3, "loss": math.nan}),
        ScoredRollout(0, 1, 0.0, {"tokens": 5}),
        ScoredRollout(1, 0, 0.0, {"tokens": 10}),
    ]
    figures = summarize_fields(found)
    assert [figures[f"{statistic}/tokens"] for statistic in ("mean", "max", "min", "median")] == [6, 10, 3, 5]
    assert figures["std/tokens"] == pytest.approx(math.sqrt(13))
    assert not [name for name in figures if name.endswith("/loss")]


def test_booleans_are_numbers_and_texts_are_not():
    found = select_numbers({"accuracy": True, "set_overlap": 0.5, "parsed": [1], "label": "Hot", "judge": None})
    assert found == {"accuracy": 1, "set_overlap": 0.5}
    assert found["accuracy"] is not True
    assert select_numbers({"huge": 10**400, "large": 2**70, "flag": True}) == {"large": 2**70, "flag": 1}


@pytest.mark.parametrize(
    ("tasks", "expected"),
    [
        ([[0.0], [1.0], [1.0], [0.5]], statistics.stdev([0.0, 1.0, 1.0, 0.5]) / 2),
        ([[1.0, 0.0, 0.0], [1.0] * 3, [0.0] * 3], statistics.stdev([1 / 3, 1, 0]) / math.sqrt(3)),
        ([[1.0, 0.0, 1.0, 0.0]], statistics.stdev([1, 0, 1, 0]) / 2),
    ],
)
def test_the_standard_error_uses_the_task_means_and_that_of_one_task_its_repeats(tasks, expected):
    assert stderr(rollouts(tasks)) == pytest.approx(expected)


def test_a_line_is_parsed_with_its_usage_and_answer():
    row = {
        "_ng_task_index": 3,
        "_ng_rollout_index": 1,
        "_ng_attempt_index": 2,
        "reward": 1.0,
        "accuracy": True,
        "extracted_answer": "7",
        "response": {"usage": {"input_tokens": 10, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 4}}},
    }
    expected = ScoredRollout(3, 1, 1.0, {"accuracy": 1, "input_tokens": 10, "output_tokens": 2}, answer="7")
    assert parse_scored_rollout(StoredRollout(row)) == expected
    bare = {"reward": 0.5, "response": {"usage": None}}
    assert parse_scored_rollout(StoredRollout(bare)) == ScoredRollout(0, 0, 0.5)
    # An answer that is not text can be voted on.
    row = {"reward": 1.0, "extracted_answer": {"b": 1, "a": [2]}}
    assert parse_scored_rollout(StoredRollout(row)).answer == '{"a": [2], "b": 1}'


def test_groups_list_the_rollouts_of_each_task_and_the_missing_rollouts():
    found = [ScoredRollout(7, 2, 1.0, {"tokens": 4}), ScoredRollout(7, 0, 0.0, {"tokens": 2}), ScoredRollout(9, 0, 0.5)]
    first, second = summarize_tasks(
        found, expected=4, samples={7: {"id": 1, "_ng_task_index": 7, "_ng_rollout_index": 0}}
    )
    assert first["_ng_task_index"] == 7
    assert first["sample"] == {"id": 1}
    assert (first["num_rollouts"], first["expected_num_rollouts"], first["missing_num_rollouts"]) == (2, 4, 2)
    assert first["reward_profile_completion_pct"] == 50
    assert (first["mean/reward"], first["max/tokens"]) == (0.5, 4)
    assert first["rollout_infos"] == [
        {"rollout_id": "7:0", "_ng_task_index": 7, "_ng_rollout_index": 0, "reward": 0.0, "tokens": 2},
        {"rollout_id": "7:2", "_ng_task_index": 7, "_ng_rollout_index": 2, "reward": 1.0, "tokens": 4},
    ]
    assert "sample" not in second
    # The existing rollouts are expected by default, and none of more rollouts is missing.
    for expected in (None, 2):
        (entry,) = summarize_tasks([ScoredRollout(0, repeat, 1.0) for repeat in range(3)], expected=expected)
        assert (entry["expected_num_rollouts"], entry["missing_num_rollouts"]) == (expected or 3, 0)
        assert entry["reward_profile_completion_pct"] == 100


@pytest.mark.slow
@pytest.mark.parametrize("repeats", [[20_000], [1] * 20_000])
def test_the_computation_takes_linear_time(repeats):
    found = [
        ScoredRollout(task, repeat, float((task + repeat) % 3 == 0), {"tokens": repeat}, answer=str(repeat % 5))
        for task, count in enumerate(repeats)
        for repeat in range(count)
    ]
    started = time.process_time()
    figures = aggregate(found, answers=True)
    # A quadratic algorithm would take minutes.
    assert time.process_time() - started < 10
    assert figures[f"pass@{max(repeats)}/accuracy"] > 0
