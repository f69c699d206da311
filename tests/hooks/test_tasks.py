"""The `tasks` hook: its arguments, its valid results, and the failures of invalid results."""

from __future__ import annotations

import itertools
from typing import Literal

import pytest

from gymsdk import BrokenEnvironment, Environment, Task, hookimpl
from gymsdk.errors import BadRow, UnknownSplit

from .environments import Judge, Settings


class Rows(Judge):
    """An environment with given tasks."""

    def __init__(self, answer) -> None:
        self.answer = answer

    @hookimpl
    def tasks(self, split: Literal["train", "test"], seed, config: Settings):
        return self.answer(split, seed, config)


def test_tasks_receives_the_split_the_seed_and_the_config_and_may_be_endless():
    environment = Environment("rows", Rows(lambda *given: [Task.ask(str(given))]), {"level": 2})
    assert environment.splits == ("train", "test")
    [task] = environment.tasks("test", seed=5)
    assert task.input[0]["content"] == "('test', 5, Settings(level=2))"
    endless = Rows(lambda *_: itertools.repeat({"responses_create_params": {"input": "?"}}))
    assert next(Environment("rows", endless).tasks("train")).input == [{"role": "user", "content": "?"}]
    message = "the row does not fit environment 'rows': responses_create_params: Field required"
    with pytest.raises(BadRow, match=message):
        list(Environment("rows", Rows(lambda *_: [{"answer": 1}])).tasks("train"))


def test_an_unknown_split_is_reported_with_the_known_splits():
    with pytest.raises(UnknownSplit) as caught:
        Environment("rows", Rows(lambda *_: [])).tasks("tarin")
    assert str(caught.value) == (
        "environment 'rows' has no split 'tarin'; did you mean 'train'? Its splits: train, test"
    )


def fail_after_one(*_):
    yield Task.ask("?")
    raise KeyError("gone")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (fail_after_one, "KeyError: 'gone'"),
        (lambda *_: 5, "TypeError: 'int' object is not iterable"),
        (lambda *_: 1 / 0, "Zero"),
    ],
)
def test_failing_tasks_are_named(answer, message):
    with pytest.raises(BrokenEnvironment, match=f"environment 'rows': hook 'tasks' raised {message}"):
        list(Environment("rows", Rows(answer)).tasks("train"))
