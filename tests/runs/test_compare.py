"""Runs are compared on the tasks that both have, paired by their rows."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from statistics import fmean

import pytest

from gymsdk.jsonl import dump_row, read_rows
from gymsdk.runs import read
from gymsdk.runs.compare import bootstrap, list_best, list_worst, to_json

from .conftest import Play

OPTIONS = ("multineedle", "tool_call", "--split", "train", "--repeats", "2")


@pytest.fixture(scope="module")
def weak(play: Play) -> Path:
    return play(*OPTIONS, "--limit", "20", "--model", "scripted/oracle:0.3", name="weak")


@pytest.fixture(scope="module")
def strong(play: Play) -> Path:
    return play(*OPTIONS, "--limit", "25", "--model", "scripted/oracle:0.8", "--temperature", "0.5", name="strong")


@pytest.mark.slow
def test_a_better_run_has_a_positive_difference_whose_interval_excludes_0(weak: Path, strong: Path) -> None:
    comparison = read(weak).compare(read(strong))
    assert comparison.overall is not None
    assert comparison.overall.tasks == 40
    assert comparison.overall.is_significant
    assert comparison.overall.low > 0
    assert (comparison.only_a, comparison.only_b) == (0, 10)
    assert {group.environment: group.tasks for group in comparison.environments} == {"multineedle": 20, "tool_call": 20}
    assert any("10 tasks of strong are left out" in warning for warning in comparison.warnings)
    assert any("sampling" in warning for warning in comparison.warnings)


def test_the_difference_is_the_mean_over_tasks(weak: Path, strong: Path) -> None:
    comparison = read(weak).compare(read(strong))
    means = []
    for path in (weak, strong):
        tasks: dict[str, list[float]] = {}
        for _, line in read_rows(path / "rollouts.jsonl"):
            tasks.setdefault(str(line["responses_create_params"]["input"]), []).append(line["reward"])
        means.append({task: fmean(rewards) for task, rewards in tasks.items()})
    expected = [means[1][task] - means[0][task] for task in means[0]]
    assert comparison.overall is not None
    assert comparison.overall.difference == pytest.approx(fmean(expected))
    assert sorted(pair.difference for pair in comparison.pairs) == pytest.approx(sorted(expected))
    assert comparison.overall.better == sum(difference > 0 for difference in expected)
    assert comparison.overall.flips_up == sum(pair.flip > 0 for pair in comparison.pairs)
    assert list_best(comparison, 3) == list(reversed(comparison.pairs))[:3]
    assert all(pair.difference < 0 for pair in list_worst(comparison, 100))
    pairs = to_json(comparison)["pairs"]
    assert len(pairs) == 40
    assert all(pair["difference"] == pair["b"] - pair["a"] for pair in pairs)


def test_a_run_equals_itself(weak: Path) -> None:
    comparison = read(weak).compare(read(weak))
    assert comparison.overall is not None
    assert (comparison.overall.difference, comparison.overall.low, comparison.overall.high) == (0.0, 0.0, 0.0)
    assert not comparison.overall.is_significant
    assert comparison.warnings == []


def test_tasks_are_paired_by_their_rows_and_not_by_their_numbers(weak: Path, tmp_path: Path) -> None:
    other = shutil.copytree(weak, tmp_path / "other")
    for name in ("rollouts.jsonl", "inputs.jsonl"):
        rows = [row | {"_ng_task_index": 1000 - row["_ng_task_index"]} for _, row in read_rows(weak / name)]
        random.Random(0).shuffle(rows)
        (other / name).write_bytes(b"".join(map(dump_row, rows)))
    comparison = read(weak).compare(read(other))
    assert comparison.overall is not None
    assert (comparison.overall.tasks, comparison.overall.difference) == (40, 0.0)
    assert all(pair.task_a + pair.task_b == 1000 for pair in comparison.pairs)


def test_runs_without_a_common_task_cannot_be_compared(weak: Path, play: Play) -> None:
    other = play("multineedle", "--seed", "5", "--split", "train", "--limit", "3", "--model", "scripted/oracle")
    comparison = read(weak).compare(read(other))
    assert comparison.overall is None
    assert comparison.warnings == ["the runs have no task in common"]


def test_few_tasks_give_a_warning(folder: Path) -> None:
    comparison = read(folder).compare(read(folder))
    assert comparison.warnings == ["20 common tasks are few; the interval needs 30 or more"]


def test_the_interval_covers_the_true_mean_as_often_as_it_says() -> None:
    rng = random.Random(3)
    samples = [[rng.gauss(0.1, 1.0) for _ in range(60)] for _ in range(200)]
    covered = sum(low <= 0.1 <= high for low, high in map(bootstrap, samples))
    # 95 % of 200, within four standard deviations of a binomial distribution.
    assert 178 <= covered <= 200


def test_the_interval_is_the_same_for_the_same_seed_and_for_many_tasks() -> None:
    values = [random.Random(1).random() for _ in range(50)]
    assert bootstrap(values, seed=1) == bootstrap(values, seed=1)
    rng = random.Random(2)
    low, high = bootstrap([rng.random() for _ in range(12_500)])
    assert 0.49 < low < high < 0.51


def test_the_rollouts_shown_for_a_task_are_those_that_differ_most(weak: Path, strong: Path) -> None:
    rewards = [
        {line["gymsdk"]["id"]: line["reward"] for _, line in read_rows(path / "rollouts.jsonl")}
        for path in (weak, strong)
    ]
    for pair in read(weak).compare(read(strong)).pairs:
        differences = [
            rewards[1][f"{pair.task_b}:{b}"] - rewards[0][f"{pair.task_a}:{a}"] for a in range(2) for b in range(2)
        ]
        expected = min(differences) if pair.difference < 0 else max(differences)
        assert rewards[1][pair.shown_b] - rewards[0][pair.shown_a] == expected
