"""The deck: which task a reset plays, drawn by a seed or named by the caller."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from gymsdk import rows
from gymsdk.environment import Environment
from gymsdk.errors import BadRow, UnknownSplit, UsageError
from gymsdk.types import Row, Task

MOST = 10_000
"""How many tasks of a split that does not depend on the seed are drawn from."""

SEEDS = 2**31 - 1
"""Below this lie the seeds that are drawn."""

PROBES = 3
"""How many seeds tell whether a split depends on them."""

IDS = ("id", "task_id", "uuid")
"""The fields by which a row may be named."""

GIVEN = "tasks"
"""What stands for the split in the id of a task that was given."""


class Deck:
    """The tasks of one environment's *split*, or the *given* ones: a file of rows, or rows.

    A task's id is `SPLIT:SEED:INDEX`, the index-th of the split's tasks with that seed. Raises `UnknownSplit`, and
    `BadRow` where a given row does not fit.
    """

    def __init__(
        self,
        environment: Environment,
        *,
        split: str | None = None,
        given: str | Path | Iterable[Row | Task] | None = None,
    ) -> None:
        self._environment = environment
        if split is not None and given is not None:
            raise UsageError(f"tasks come from a split or are given, not both; leave out split={split!r} or tasks=")
        self.given = None if given is None else [environment.read(row) for row in _rows(given)]
        if self.given == []:
            raise BadRow("there is no task among those given; give at least one row")
        self.split = GIVEN if self.given is not None else _known(environment, split)
        self._others: dict[str, Deck] = {}

    @property
    def origin(self) -> dict[str, Any]:
        """Where the tasks come from, as arguments of `Env`."""
        return {"split": self.split} if self.given is None else {"tasks": self.given}

    def draw(self, rng: np.random.Generator) -> tuple[Task, str]:
        """Give a task and its id, any of them alike."""
        if self._seeded:
            return self._fresh(rng)
        index = int(rng.integers(len(self._listed)))
        return self._listed[index], f"{self.split}:0:{index}"

    def named(self, task: object, split: str | None = None) -> tuple[Task, str]:
        """Give the task that is a row itself, the number of one, or an id, and its id."""
        if isinstance(task, (Task, dict)):
            return self._environment.read(task), ""
        where = split or self.split
        if isinstance(task, str):
            return self._found(task, where)
        if isinstance(task, bool) or not isinstance(task, (int, np.integer)) or task < 0:
            raise BadRow(f"options['task'] is a row, a number from 0 or an id, not {task!r}")
        return self._at(0, int(task), where)

    def elsewhere(self, split: str, rng: np.random.Generator) -> tuple[Task, str]:
        """Give a task of another *split*."""
        if split == self.split:
            return self.draw(rng)
        if split not in self._others:
            self._others[split] = Deck(self._environment, split=split)
        return self._others[split].draw(rng)

    def _fresh(self, rng: np.random.Generator) -> tuple[Task, str]:
        seed = int(rng.integers(SEEDS))
        for task in self._environment.tasks(self.split, seed=seed):
            return task, f"{self.split}:{seed}:0"
        raise UnknownSplit(f"split {self.split!r} of environment {self._environment.name!r} has no task")

    @cached_property
    def _seeded(self) -> bool:
        """Whether the split's tasks depend on the seed: then every draw may be a task never seen before."""
        if self.given is not None:
            return False
        first = [next(self._environment.tasks(self.split, seed=seed), None) for seed in range(PROBES)]
        return any(task != first[0] for task in first)

    @cached_property
    def _listed(self) -> Sequence[Task]:
        if self.given is not None:
            return self.given
        found = list(islice(self._environment.tasks(self.split), MOST))
        if not found:
            raise UnknownSplit(f"split {self.split!r} of environment {self._environment.name!r} has no task")
        return found

    def _at(self, seed: int, index: int, split: str) -> tuple[Task, str]:
        own = split == self.split and self.given is not None
        tasks = iter(self._listed) if own else self._environment.tasks(split, seed=seed)
        for task in islice(tasks, index, None):
            return task, f"{split}:{seed}:{index}"
        raise BadRow(
            f"split {split!r} of environment {self._environment.name!r} has no task {index}; they count from 0"
        )

    def _found(self, id: str, split: str) -> tuple[Task, str]:
        parts = id.rsplit(":", 2)
        known = {*self._environment.splits, self.split}
        if len(parts) == 3 and parts[0] in known and all(map(str.isdecimal, parts[1:])):  # noqa: PLR2004  # split, seed, index
            return self._at(int(parts[1]), int(parts[2]), parts[0])
        tasks = self._listed if split == self.split else islice(self._environment.tasks(split), MOST)
        for index, task in enumerate(tasks):
            if any(_value(task, key) == id for key in IDS):
                return task, f"{split}:0:{index}"
        raise BadRow(f"split {split!r} of environment {self._environment.name!r} has no task with the id {id!r}")


def _value(task: Task, key: str) -> Any:
    return getattr(task, key, None)


def _rows(given: str | Path | Iterable[Row | Task]) -> Iterable[Row | Task]:
    if isinstance(given, (str, Path)):
        return (row for _, row in rows.read(Path(given)))
    if isinstance(given, (Task, Mapping)) or not isinstance(given, Iterable):
        raise BadRow(
            f"tasks are a JSONL file or a list of rows, not a {type(given).__name__}; put a single row in a list"
        )
    return given


def _known(environment: Environment, split: str | None) -> str:
    if split is not None:
        if split not in environment.splits:
            environment.tasks(split)  # raises, and knows what to say
        return split
    if not environment.splits:
        raise UnknownSplit(f"environment {environment.name!r} has no tasks of its own; give some with tasks=")
    return "train" if "train" in environment.splits else environment.splits[0]
