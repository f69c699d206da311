"""The deck: which task a reset plays."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gymsdk import Environment, Task
from gymsdk.errors import BadRow, UnknownSplit, UsageError
from gymsdk.gym.sampler import TaskSampler

KINDS = """
class Kind(Task):
    kind: int
    uuid: str = ""

@hookimpl
def tasks(split: Literal["train", "test", "few", "none"], seed):
    many = {"train": 10**9, "test": 10, "few": 3, "none": 0}[split]
    for number in range(many):
        # `test` is the same whatever the seed.
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


def asked(drawn: tuple[Task, str]) -> str:
    task, _ = drawn
    return str(task.input[0]["content"])


def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_a_generator_in_the_same_state_draws_the_same(kinds: Environment) -> None:
    deck = TaskSampler(kinds)
    one, other = rng(1), rng(1)
    assert [deck.draw(one) for _ in range(5)] == [deck.draw(other) for _ in range(5)]


def test_every_task_drawn_of_an_endless_split_is_a_new_one(kinds: Environment) -> None:
    deck = TaskSampler(kinds)
    assert len({asked(deck.draw(rng(seed))) for seed in range(50)}) == 50


def test_a_split_that_is_the_same_for_all_seeds_is_drawn_from_whole(kinds: Environment) -> None:
    deck = TaskSampler(kinds, split="test")
    assert {asked(deck.draw(rng(seed))) for seed in range(200)} == {f"test 0 {number}" for number in range(10)}


@pytest.mark.parametrize("split", ["train", "test", "few"])
def test_the_id_of_a_task_drawn_names_it(kinds: Environment, split: str) -> None:
    deck = TaskSampler(kinds, split=split)
    drawn = deck.draw(rng(3))
    assert deck.find(drawn[1]) == drawn
    assert TaskSampler(kinds).find(drawn[1]) == drawn


def test_a_number_is_one_of_the_first_seed(kinds: Environment) -> None:
    named = TaskSampler(kinds).find(4)
    assert (asked(named), named[1]) == ("train 0 4", "train:0:4")
    assert asked(TaskSampler(kinds).find(np.int64(4), "test")) == "test 0 4"


def test_a_row_is_named_by_its_own_id(kinds: Environment) -> None:
    assert asked(TaskSampler(kinds, split="test").find("row-7")) == "test 0 7"
    assert asked(TaskSampler(kinds).find("row-2", "few")) == "few 0 2"


def test_a_row_is_itself(kinds: Environment) -> None:
    named = TaskSampler(kinds).find(ROW)
    assert (asked(named), named[1]) == ("Mine?", "")
    assert TaskSampler(kinds).find(named[0]) == named


@pytest.mark.parametrize(
    ("task", "sentence"),
    [
        (10, "has no task 10"),
        (-1, "an index from 0"),
        (True, "an index from 0"),
        (1.5, "an index from 0"),
        ("row-99", "no task with the ID 'row-99'"),
        ("test:0:99", "has no task 99"),
        ("a:1:2", "no task with the ID 'a:1:2'"),
        ({"kind": 1}, "does not fit"),
    ],
)
def test_a_task_that_is_not_there_is_told_in_a_sentence(kinds: Environment, task: Any, sentence: str) -> None:
    with pytest.raises(BadRow, match=sentence):
        TaskSampler(kinds, split="test").find(task)


def test_tasks_are_given_as_rows_or_as_a_file(kinds: Environment, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(ROW) + "\n")
    for given in ([ROW], iter([ROW]), path, str(path), [Task.model_validate(ROW)]):
        deck = TaskSampler(kinds, tasks=given)
        assert deck.draw(rng(0))[1] == "(tasks):0:0"
        assert asked(deck.find("mine")) == "Mine?"
        assert asked(deck.find("(tasks):0:0")) == "Mine?"
        assert asked(deck.find(0)) == "Mine?"
        assert asked(deck.find(0, "test")) == "test 0 0"


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ([], "tasks= holds no task"),
        (ROW, "wrap a single row in a list"),
        ("nowhere.jsonl", "nowhere.jsonl"),
        (7, "int"),
    ],
)
def test_tasks_that_are_none_are_refused(kinds: Environment, given: Any, sentence: str) -> None:
    with pytest.raises(BadRow, match=sentence):
        TaskSampler(kinds, tasks=given)


def test_tasks_given_are_not_mistaken_for_a_split_called_tasks(environment: Callable[..., Environment]) -> None:
    named = environment(KINDS.replace('"none"]', '"tasks"]').replace('"none": 0', '"tasks": 2'))
    deck = TaskSampler(named, tasks=[ROW])
    assert asked(deck.find(deck.draw(rng(0))[1])) == "Mine?"
    assert asked(deck.find("tasks:0:1")) == asked(deck.find(1, "tasks")) == "tasks 0 1"


LONG = """
@hookimpl
def tasks(split: Literal["train", "short"], seed):
    for number in range(12_000 if split == "train" else 5):
        yield Task.ask(f"{number}", id=f"row-{number}")

@hookimpl
def verify():
    return Verdict(reward=0.0)
"""


def test_a_finite_split_is_drawn_from_to_its_end(environment: Callable[..., Environment]) -> None:
    deck = TaskSampler(environment(LONG))
    assert max(int(asked(deck.draw(rng(seed)))) for seed in range(100)) > 11_000
    assert asked(deck.find("row-11999")) == "11999"
    assert asked(TaskSampler(environment(LONG), split="short").find("row-11999", "train")) == "11999"


def test_an_endless_split_that_is_always_the_same_is_drawn_from_within_a_bound_that_is_told(
    environment: Callable[..., Environment], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("gymsdk.gym.sampler.MAX_LISTED_TASKS", 10)
    deck = TaskSampler(
        environment(LONG.replace('range(12_000 if split == "train" else 5)', "__import__('itertools').count()"))
    )
    assert {int(asked(deck.draw(rng(seed)))) for seed in range(100)} == set(range(10))
    assert "more than 10 tasks; only the first 10 are drawn from" in caplog.text
    assert "let its tasks depend on the seed" in caplog.text
    with pytest.raises(BadRow, match="no task with the ID 'row-11' among its first 10;"):
        deck.find("row-11")


def test_an_id_that_is_sought_in_an_endless_split_is_sought_within_a_bound_that_is_told(
    kinds: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gymsdk.gym.sampler.MAX_SEARCHED_TASKS", 10)
    assert asked(TaskSampler(kinds).find("row-9")) == "train 0 9"
    with pytest.raises(BadRow, match="no task with the ID 'row-10' among its first 10;"):
        TaskSampler(kinds).find("row-10")


@pytest.mark.parametrize("task", [10, 10**30, "train:0:10", f"train:7:{10**12}"])
def test_a_number_beyond_what_is_searched_of_a_split_that_may_be_endless_is_told_at_once(
    kinds: Environment, monkeypatch: pytest.MonkeyPatch, task: int | str
) -> None:
    monkeypatch.setattr("gymsdk.gym.sampler.MAX_SEARCHED_TASKS", 10)
    assert asked(TaskSampler(kinds).find(9)) == "train 0 9"
    with pytest.raises(BadRow, match=r"the index 10+ exceeds the largest that is searched, 9; choose a smaller index"):
        TaskSampler(kinds).find(task)


@pytest.mark.parametrize("task", [99_999, "train:5:99999", "nobody"])
def test_a_task_is_sought_no_longer_than_the_seconds_of_a_reset(kinds: Environment, task: int | str) -> None:
    with pytest.raises(
        UsageError, match=r"not found within 0.01 s \([0-9,]+ tasks read\); give the row itself, or a larger `sec"
    ):
        TaskSampler(kinds, seconds=0.01).find(task)
    assert asked(TaskSampler(kinds, seconds=1e-9).find(0)) == "train 0 0"


def test_an_id_is_sought_no_longer_than_the_seconds_where_the_split_is_the_same_for_every_seed(
    environment: Callable[..., Environment],
) -> None:
    endless = LONG.replace('range(12_000 if split == "train" else 5)', "__import__('itertools').count()")
    with pytest.raises(UsageError, match=r"not found within 0\.01 s"):
        TaskSampler(environment(endless), seconds=0.01).find("row-1")


def test_an_id_may_have_any_number_of_digits(kinds: Environment) -> None:
    with pytest.raises(BadRow, match="no task with the ID"):
        TaskSampler(kinds, split="test").find(f"test:0:{'9' * 5000}")


def test_all_given_rows_are_searched(kinds: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gymsdk.gym.sampler.MAX_LISTED_TASKS", 2)
    deck = TaskSampler(kinds, tasks=[ROW | {"uuid": f"mine-{number}"} for number in range(4)])
    assert deck.find(3)[1] == deck.find("mine-3")[1] == "(tasks):0:3"
    with pytest.raises(BadRow, match="the index 4 exceeds the largest that is searched, 3"):
        deck.find(4)


def test_tasks_come_from_one_place(kinds: Environment) -> None:
    with pytest.raises(UsageError, match="not both"):
        TaskSampler(kinds, split="test", tasks=[ROW])


def test_an_unknown_split_is_told_at_once(kinds: Environment) -> None:
    with pytest.raises(UnknownSplit, match="did you mean 'test'"):
        TaskSampler(kinds, split="tests")
    with pytest.raises(UnknownSplit, match="no split"):
        TaskSampler(kinds).draw_from("nowhere", rng(0))


def test_an_empty_split_is_told_when_it_is_drawn_from(kinds: Environment) -> None:
    with pytest.raises(UnknownSplit, match="has no task"):
        TaskSampler(kinds, split="none").draw(rng(0))


def test_an_environment_without_tasks_wants_some_given(environment: Callable[..., Environment]) -> None:
    bare = environment("@hookimpl\ndef verify():\n    return Verdict(reward=0.0)\n")
    with pytest.raises(UnknownSplit, match="tasks="):
        TaskSampler(bare)
    assert asked(TaskSampler(bare, tasks=[ROW]).draw(rng(0))) == "Mine?"


def test_another_split_is_drawn_from_on_demand(kinds: Environment) -> None:
    assert asked(TaskSampler(kinds).draw_from("test", rng(0))).startswith("test")
    assert asked(TaskSampler(kinds).draw_from("train", rng(0))).startswith("train")
