"""The deck: which task a reset plays, drawn by a seed or named by the caller."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from time import monotonic
from types import NoneType
from typing import Any

import numpy as np

from gymsdk import jsonl
from gymsdk.deadlines import DEFAULT_STAGE_SECONDS
from gymsdk.environment import Environment
from gymsdk.errors import BadRow, UnknownSplit, UsageError
from gymsdk.types import Row, Task

MOST = 1_000_000
"""Where the reading of a split ends that does not depend on the seed: it is drawn from whole, unless it is endless."""

SOUGHT = 100_000
"""Among how many tasks of a split that depends on the seed one is sought, by number or id: it may be endless."""

SEEDS = 2**31 - 1
"""Below this lie the seeds that are drawn."""

PROBES = 3
"""How many seeds tell whether a split depends on them."""

IDS = ("id", "task_id", "uuid")
"""The fields by which a row may be named."""

GIVEN = "(tasks)"
"""What stands for the split in the id of a task that was given: no split is called so."""

DRAWN = re.compile(r"(.*):([0-9]{1,19}):([0-9]{1,19})", re.DOTALL)
"""The id of a task that was drawn: split, seed, index."""


log = logging.getLogger("gymsdk")


class Deck:
    """The tasks of one environment's *split*, or the *given* ones: a file of rows, or rows.

    A task's id is `SPLIT:SEED:INDEX`, the index-th of the split's tasks with that seed. One that is named is sought
    for at most *seconds*. Raises `UnknownSplit`, and `BadRow` where a given row does not fit.
    """

    def __init__(
        self,
        environment: Environment,
        *,
        split: str | None = None,
        given: str | Path | Iterable[Row | Task] | None = None,
        seconds: float = DEFAULT_STAGE_SECONDS,
    ) -> None:
        self._environment = environment
        self._seconds = seconds
        if split is not None and given is not None:
            raise UsageError(f"tasks come from a split or are given, not both; leave out split={split!r} or tasks=")
        self.given = None if given is None else [environment.read(row) for row in _rows(given)]
        if self.given == []:
            raise BadRow("there is no task among those given; give at least one row")
        self._whole: Sequence[Task] | None = self.given
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
        where = self.split if split is None else split
        if isinstance(task, str):
            return self._found(task, where)
        if isinstance(task, bool) or not isinstance(task, (int, np.integer)) or task < 0:
            raise BadRow(f"options['task'] is a row, a number from 0 or an id, not {task!r}")
        return self._deck(where).numbered(int(task))

    def elsewhere(self, split: str, rng: np.random.Generator) -> tuple[Task, str]:
        """Give a task of another *split*."""
        return self._deck(split).draw(rng)

    def _deck(self, split: str) -> Deck:
        if split == self.split:
            return self
        if split not in self._others:
            self._others[split] = Deck(self._environment, split=split, seconds=self._seconds)
        return self._others[split]

    def _fresh(self, rng: np.random.Generator) -> tuple[Task, str]:
        seed = int(rng.integers(SEEDS))
        for task in self._environment.tasks(self.split, seed=seed):
            return task, f"{self.split}:{seed}:0"
        raise UnknownSplit(f"{self.called} has no task")

    @cached_property
    def _seeded(self) -> bool:
        """Whether the split's tasks depend on the seed: then every draw may be a task never seen before."""
        if self.given is not None:
            return False
        first = [next(self._environment.tasks(self.split, seed=seed), None) for seed in range(PROBES)]
        return any(task != first[0] for task in first)

    @property
    def _listed(self) -> Sequence[Task]:
        return self._whole or self._read(self._environment.tasks(self.split))

    def _read(self, tasks: Iterator[Task]) -> Sequence[Task]:
        """Give the *tasks* of a split that is the same for every seed, and keep them."""
        found = list(islice(tasks, MOST))
        if not found:
            raise UnknownSplit(f"{self.called} has no task")
        if len(found) == MOST and next(tasks, None) is not None:
            advice = "if it is endless, let its tasks depend on the seed"
            log.warning(
                "%s is the same for every seed and has more than the %d tasks drawn from; %s",
                self.called,
                MOST,
                advice,
            )
        self._whole = found
        return found

    @property
    def called(self) -> str:
        """What a message calls its tasks."""
        split = f"split {self.split!r} of environment {self._environment.name!r}"
        return split if self.given is None else f"what was given as tasks= of environment {self._environment.name!r}"

    def numbered(self, index: int, *, seed: int = 0) -> tuple[Task, str]:
        """Give the *index*-th task with that *seed*; raises `BadRow`."""
        if index >= self._most:
            message = f"{self.called} is searched for a task by its number among its first {self._most:,}"
            raise BadRow(f"{message}, and {index} is beyond; take a lower one, or give the row itself")
        tasks = self._environment.tasks(self.split, seed=seed) if self._whole is None else iter(self._whole)
        for task in islice(self._in_time(tasks), index, None):
            return task, f"{self.split}:{seed}:{index}"
        raise BadRow(f"{self.called} has no task {index}; they count from 0")

    def _found(self, id: str, split: str) -> tuple[Task, str]:
        drawn = DRAWN.fullmatch(id)
        if drawn and drawn[1] in {*self._environment.splits, self.split}:
            return self._deck(drawn[1]).numbered(int(drawn[3]), seed=int(drawn[2]))
        return self._deck(split).owning(id)

    def owning(self, id: str) -> tuple[Task, str]:
        """Give the task that has this *id* of its own; raises `BadRow`."""
        sought: Iterable[Task] = self._whole or ()
        if not sought:
            tasks = self._in_time(self._environment.tasks(self.split))
            sought = islice(tasks, SOUGHT) if self._seeded else self._read(tasks)
        count = 0
        for count, task in enumerate(sought, 1):
            if any(_value(task, key) == id for key in IDS):
                return task, f"{self.split}:0:{count - 1}"
        first = f" among its first {count:,}" if count in {SOUGHT, MOST} else ""
        raise BadRow(f"{self.called} has no task with the id {id!r}{first}; a row itself or a number names one, too")

    @property
    def _most(self) -> int:
        """Among how many tasks one is sought."""
        if self.given is not None:
            return max(MOST, len(self.given))
        return SOUGHT if self._seeded else MOST

    def _in_time(self, tasks: Iterator[Task]) -> Iterator[Task]:
        """Yield *tasks* until the time is up; raises `UsageError` then."""
        end = monotonic() + self._seconds
        for count, task in enumerate(tasks, 1):
            yield task
            if monotonic() > end:
                message = f"{self.called}: the task that was named was not found in {self._seconds:g} s"
                raise UsageError(f"{message}, {count:,} read; give the row itself, or a longer `seconds`")


def _value(task: Task, key: str) -> Any:
    return getattr(task, key, None)


def _rows(given: str | Path | Iterable[Row | Task]) -> Iterable[Row | Task]:
    if isinstance(given, (str, Path)):
        return (row for _, row in jsonl.read_rows(Path(given)))
    if isinstance(given, (Task, Mapping)) or not isinstance(given, Iterable):
        raise BadRow(
            f"tasks are a JSONL file or a list of rows, not a {type(given).__name__}; put a single row in a list"
        )
    return given


def _known(environment: Environment, split: str | None) -> str:
    if not isinstance(split, (str, NoneType)):
        raise UsageError(f"split is the name of a split, not {split!r}; the splits: {', '.join(environment.splits)}")
    if split is not None:
        if split not in environment.splits:
            environment.tasks(split)  # raises, and knows what to say
        return split
    if not environment.splits:
        raise UnknownSplit(f"environment {environment.name!r} has no tasks of its own; give some with tasks=")
    return "train" if "train" in environment.splits else environment.splits[0]
