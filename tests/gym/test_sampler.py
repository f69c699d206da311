"""The task sampler: which task a reset plays."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gymsdk import Environment, Task
from gymsdk.errors import BadRow, UnknownSplit, UsageError
from gymsdk.gym.config import TaskSampler

KINDS = """
class Kind(Task):
    kind: int
    uuid: str = ""

@hookimpl
def tasks(split: Literal["train", "test", "few", "none"], seed):
    many = {"train": 10**9, "test": 10, "few": 3, "none": 0}[split]
    for number in range(many):
        # `test` ignores the seed.
        own = 0 if split == "test" else seed
        yield Kind.ask(f"{split} {own} {number}", kind=number % 11, uuid=f"row-{number}")

@hookimpl
def verify():
    return Verdict(reward=0.0)
"""

ROW = {"responses_create_params": {"input": "Mine?"}, "kind": 5, "uuid": "mine"}


@pytest.fixture
def kinds(environment: Callable[..., Environment]) -> Environment:
    return environment(KINDS)


def prompt(drawn: tuple[Task, str]) -> str:
    task, _ = drawn
    return str(task.input[0]["content"])


def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_draws_depend_on_the_generator_and_cover_the_split(kinds: Environment) -> None:
    sampler = TaskSampler(kinds)
    one, other = rng(1), rng(1)
    assert [sampler.draw(one) for _ in range(5)] == [sampler.draw(other) for _ in range(5)]
    assert len({prompt(sampler.draw(rng(seed))) for seed in range(50)}) == 50
    # A split that ignores the seed is sampled over all its tasks.
    drawn = {prompt(TaskSampler(kinds, split="test").draw(rng(seed))) for seed in range(200)}
    assert drawn == {f"test 0 {number}" for number in range(10)}
    assert prompt(sampler.draw_from("test", rng(0))).startswith("test")


@pytest.mark.parametrize("split", ["train", "test", "few"])
def test_the_id_of_a_drawn_task_finds_it_again(kinds: Environment, split: str) -> None:
    sampler = TaskSampler(kinds, split=split)
    drawn = sampler.draw(rng(3))
    assert sampler.find(drawn[1]) == drawn
    assert TaskSampler(kinds).find(drawn[1]) == drawn


def test_a_task_is_found_by_its_index_its_own_id_or_its_row(kinds: Environment) -> None:
    named = TaskSampler(kinds).find(4)
    assert (prompt(named), named[1]) == ("train 0 4", "train:0:4")
    assert prompt(TaskSampler(kinds).find(np.int64(4), "test")) == "test 0 4"
    assert prompt(TaskSampler(kinds, split="test").find("row-7")) == "test 0 7"
    assert prompt(TaskSampler(kinds).find("row-2", "few")) == "few 0 2"
    named = TaskSampler(kinds).find(ROW)
    assert (prompt(named), named[1]) == ("Mine?", "")
    assert TaskSampler(kinds).find(named[0]) == named


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (10, "has no task 10"),
        (-1, "an index from 0"),
        (True, "an index from 0"),
        (1.5, "an index from 0"),
        ("row-99", "no task with the ID 'row-99'"),
        ("test:0:99", "has no task 99"),
        ("a:1:2", "no task with the ID 'a:1:2'"),
        (f"test:0:{'9' * 5000}", "no task with the ID"),
        ({"kind": 1}, "does not fit"),
    ],
)
def test_an_unknown_task_is_rejected_with_an_explanation(kinds: Environment, task: Any, message: str) -> None:
    with pytest.raises(BadRow, match=message):
        TaskSampler(kinds, split="test").find(task)


def test_tasks_can_be_rows_or_a_file(kinds: Environment, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(ROW) + "\n")
    for tasks in ([ROW], iter([ROW]), path, str(path), [Task.model_validate(ROW)]):
        sampler = TaskSampler(kinds, tasks=tasks)
        assert sampler.draw(rng(0))[1] == "(tasks):0:0"
        assert prompt(sampler.find("mine")) == "Mine?"
        assert prompt(sampler.find("(tasks):0:0")) == "Mine?"
        assert prompt(sampler.find(0)) == "Mine?"
        assert prompt(sampler.find(0, "test")) == "test 0 0"


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ([], "tasks= holds no task"),
        (ROW, "wrap a single row in a list"),
        ("nowhere.jsonl", "nowhere.jsonl"),
        (7, "int"),
    ],
)
def test_invalid_tasks_are_rejected(kinds: Environment, tasks: Any, message: str) -> None:
    with pytest.raises(BadRow, match=message):
        TaskSampler(kinds, tasks=tasks)


def test_given_tasks_are_not_confused_with_a_split_called_tasks(environment: Callable[..., Environment]) -> None:
    named = environment(KINDS.replace('"none"]', '"tasks"]').replace('"none": 0', '"tasks": 2'))
    sampler = TaskSampler(named, tasks=[ROW])
    assert prompt(sampler.find(sampler.draw(rng(0))[1])) == "Mine?"
    assert prompt(sampler.find("tasks:0:1")) == prompt(sampler.find(1, "tasks")) == "tasks 0 1"


LONG = """
@hookimpl
def tasks(split: Literal["train", "short"], seed):
    for number in range(12_000 if split == "train" else 5):
        yield Task.ask(f"{number}", id=f"row-{number}")

@hookimpl
def verify():
    return Verdict(reward=0.0)
"""


ENDLESS = LONG.replace('range(12_000 if split == "train" else 5)', "__import__('itertools').count()")


@pytest.mark.slow
def test_a_finite_split_is_sampled_up_to_its_end(environment: Callable[..., Environment]) -> None:
    sampler = TaskSampler(environment(LONG))
    assert max(int(prompt(sampler.draw(rng(seed)))) for seed in range(100)) > 11_000
    assert prompt(sampler.find("row-11999")) == "11999"
    assert prompt(TaskSampler(environment(LONG), split="short").find("row-11999", "train")) == "11999"


def test_an_endless_split_that_ignores_the_seed_is_sampled_within_a_reported_limit(
    environment: Callable[..., Environment], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("gymsdk.gym.config.MAX_LISTED_TASKS", 10)
    sampler = TaskSampler(environment(ENDLESS))
    assert {int(prompt(sampler.draw(rng(seed)))) for seed in range(100)} == set(range(10))
    assert "more than 10 tasks; only the first 10 are drawn from" in caplog.text
    assert "let its tasks depend on the seed" in caplog.text
    with pytest.raises(BadRow, match="no task with the ID 'row-11' among its first 10;"):
        sampler.find("row-11")


@pytest.mark.parametrize("task", ["row-10", 10, 10**30, "train:0:10", f"train:7:{10**12}"])
def test_a_task_beyond_the_search_limit_is_rejected_at_once(
    kinds: Environment, monkeypatch: pytest.MonkeyPatch, task: int | str
) -> None:
    monkeypatch.setattr("gymsdk.gym.config.MAX_SEARCHED_TASKS", 10)
    assert prompt(TaskSampler(kinds).find("row-9")) == prompt(TaskSampler(kinds).find(9)) == "train 0 9"
    message = r"the index 10+ exceeds the largest that is searched, 9; choose a smaller index"
    if task == "row-10":
        message = "no task with the ID 'row-10' among its first 10;"
    with pytest.raises(BadRow, match=message):
        TaskSampler(kinds).find(task)


@pytest.mark.parametrize("task", [99_999, "train:5:99999", "nobody", "row-1"])
def test_the_search_for_a_task_stops_after_the_seconds_of_a_reset(
    kinds: Environment, environment: Callable[..., Environment], task: int | str
) -> None:
    """The search for `row-1` reads a split that ignores the seed."""
    searched = environment(ENDLESS) if task == "row-1" else kinds
    message = r"not found within 0.01 s \([0-9,]+ tasks read\); give the row itself, or a larger `sec"
    with pytest.raises(UsageError, match=message):
        TaskSampler(searched, seconds=0.01).find(task)
    assert prompt(TaskSampler(kinds, seconds=1e-9).find(0)) == "train 0 0"


def test_all_given_rows_are_searched(kinds: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gymsdk.gym.config.MAX_LISTED_TASKS", 2)
    sampler = TaskSampler(kinds, tasks=[ROW | {"uuid": f"mine-{number}"} for number in range(4)])
    assert sampler.find(3)[1] == sampler.find("mine-3")[1] == "(tasks):0:3"
    with pytest.raises(BadRow, match="the index 4 exceeds the largest that is searched, 3"):
        sampler.find(4)


def test_a_split_without_tasks_is_rejected(kinds: Environment, environment: Callable[..., Environment]) -> None:
    with pytest.raises(UsageError, match="not both"):
        TaskSampler(kinds, split="test", tasks=[ROW])
    with pytest.raises(UnknownSplit, match="did you mean 'test'"):
        TaskSampler(kinds, split="tests")
    with pytest.raises(UnknownSplit, match="no split"):
        TaskSampler(kinds).draw_from("nowhere", rng(0))
    with pytest.raises(UnknownSplit, match="has no task"):
        TaskSampler(kinds, split="none").draw(rng(0))
    bare = environment("@hookimpl\ndef verify():\n    return Verdict(reward=0.0)\n")
    with pytest.raises(UnknownSplit, match="tasks="):
        TaskSampler(bare)
    assert prompt(TaskSampler(bare, tasks=[ROW]).draw(rng(0))) == "Mine?"
