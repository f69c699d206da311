"""The task sampler: draws the task of an episode with a seed, or finds the task that the caller selects."""

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

MAX_LISTED_TASKS = 1_000_000
"""How many tasks of a split are listed and drawn from, if the split does not depend on the seed: it may be endless."""

MAX_SEARCHED_TASKS = 100_000
"""How many tasks are searched for an index or an ID, if the split depends on the seed: it may be endless."""

SEED_BOUND = 2**31 - 1
"""The exclusive upper bound of drawn seeds."""

SEED_PROBES = 3
"""How many seeds are compared to find out whether a split depends on the seed."""

ID_FIELDS = ("id", "task_id", "uuid")
"""The fields of a row that may hold its ID."""

GIVEN_SPLIT = "(tasks)"
"""The split's name in the IDs of tasks that the caller gave; no split has this name."""

TASK_ID_PATTERN = re.compile(r"(.*):([0-9]{1,19}):([0-9]{1,19})", re.DOTALL)
"""The ID of a drawn task: split, seed, index."""


log = logging.getLogger("gymsdk")


class TaskSampler:
    """Draws and finds the tasks of a split, or of a given list of rows.

    The ID of a task is `SPLIT:SEED:INDEX`: its index among the tasks of the split with that seed.

    Args:
        environment: The environment that the tasks are for.
        split: The name of the split; `train` by default, if there is one.
        tasks: The tasks to use instead of a split: the path of a JSONL file, or rows.
        seconds: The time limit of a search for a task.

    Raises:
        UnknownSplit: The environment does not have the split.
        BadRow: A given row is invalid.
    """

    def __init__(
        self,
        environment: Environment,
        *,
        split: str | None = None,
        tasks: str | Path | Iterable[Row | Task] | None = None,
        seconds: float = DEFAULT_STAGE_SECONDS,
    ) -> None:
        self._environment = environment
        self._seconds = seconds
        if split is not None and tasks is not None:
            raise UsageError(f"give either a split or tasks, not both; remove split={split!r} or tasks=")
        self.tasks = None if tasks is None else [environment.read(row) for row in _read_rows(tasks)]
        if self.tasks == []:
            raise BadRow("tasks= holds no task; give at least one row")
        self._whole: Sequence[Task] | None = self.tasks
        self.split = GIVEN_SPLIT if self.tasks is not None else _check_split(environment, split)
        self._others: dict[str, TaskSampler] = {}

    @property
    def origin(self) -> dict[str, Any]:
        """The source of the tasks, as arguments of `Env`."""
        return {"split": self.split} if self.tasks is None else {"tasks": self.tasks}

    def draw(self, rng: np.random.Generator) -> tuple[Task, str]:
        """Draw a task uniformly; return the task and its ID."""
        if self._depends_on_seed:
            return self._draw_with_new_seed(rng)
        index = int(rng.integers(len(self._all_tasks)))
        return self._all_tasks[index], f"{self.split}:0:{index}"

    def find(self, task: object, split: str | None = None) -> tuple[Task, str]:
        """Return the task given as a row, an index or an ID, and its ID."""
        if isinstance(task, (Task, dict)):
            return self._environment.read(task), ""
        where = self.split if split is None else split
        if isinstance(task, str):
            return self._find_by_id(task, where)
        if isinstance(task, bool) or not isinstance(task, (int, np.integer)) or task < 0:
            raise BadRow(f"options['task'] must be a row, an index from 0 or an ID, got {task!r}")
        return self._sampler_for(where).get_by_index(int(task))

    def draw_from(self, split: str, rng: np.random.Generator) -> tuple[Task, str]:
        """Draw a task of the split *split*."""
        return self._sampler_for(split).draw(rng)

    def _sampler_for(self, split: str) -> TaskSampler:
        if split == self.split:
            return self
        if split not in self._others:
            self._others[split] = TaskSampler(self._environment, split=split, seconds=self._seconds)
        return self._others[split]

    def _draw_with_new_seed(self, rng: np.random.Generator) -> tuple[Task, str]:
        seed = int(rng.integers(SEED_BOUND))
        for task in self._environment.tasks(self.split, seed=seed):
            return task, f"{self.split}:{seed}:0"
        raise UnknownSplit(f"{self.description} has no task")

    @cached_property
    def _depends_on_seed(self) -> bool:
        """Whether the split's tasks depend on the seed, so that each draw may use a new seed."""
        if self.tasks is not None:
            return False
        first = [next(self._environment.tasks(self.split, seed=seed), None) for seed in range(SEED_PROBES)]
        return any(task != first[0] for task in first)

    @property
    def _all_tasks(self) -> Sequence[Task]:
        return self._whole or self._read_all(self._environment.tasks(self.split))

    def _read_all(self, tasks: Iterator[Task]) -> Sequence[Task]:
        """List the *tasks* of a split that does not depend on the seed, and keep the list."""
        found = list(islice(tasks, MAX_LISTED_TASKS))
        if not found:
            raise UnknownSplit(f"{self.description} has no task")
        if len(found) == MAX_LISTED_TASKS and next(tasks, None) is not None:
            log.warning(
                "%s does not depend on the seed and has more than %d tasks; only the first %d are drawn from. "
                "If the split is endless, let its tasks depend on the seed",
                self.description,
                MAX_LISTED_TASKS,
                MAX_LISTED_TASKS,
            )
        self._whole = found
        return found

    @property
    def description(self) -> str:
        """The source of the tasks, for messages."""
        split = f"split {self.split!r} of environment {self._environment.name!r}"
        return split if self.tasks is None else f"the list given as tasks= of environment {self._environment.name!r}"

    def get_by_index(self, index: int, *, seed: int = 0) -> tuple[Task, str]:
        """Return the task at *index* among the tasks with that *seed*; raises `BadRow`."""
        if index >= self._max_searched_tasks:
            raise BadRow(
                f"{self.description}: the index {index} exceeds the largest that is searched,"
                f" {self._max_searched_tasks - 1:,}; choose a smaller index, or give the row itself"
            )
        tasks = self._environment.tasks(self.split, seed=seed) if self._whole is None else iter(self._whole)
        for task in islice(self._limit_time(tasks), index, None):
            return task, f"{self.split}:{seed}:{index}"
        raise BadRow(f"{self.description} has no task {index}; indices start at 0")

    def _find_by_id(self, id: str, split: str) -> tuple[Task, str]:
        drawn = TASK_ID_PATTERN.fullmatch(id)
        if drawn and drawn[1] in {*self._environment.splits, self.split}:
            return self._sampler_for(drawn[1]).get_by_index(int(drawn[3]), seed=int(drawn[2]))
        return self._sampler_for(split).get_by_id(id)

    def get_by_id(self, id: str) -> tuple[Task, str]:
        """Return the task whose row has the ID *id*; raises `BadRow`."""
        sought: Iterable[Task] = self._whole or ()
        if not sought:
            tasks = self._limit_time(self._environment.tasks(self.split))
            sought = islice(tasks, MAX_SEARCHED_TASKS) if self._depends_on_seed else self._read_all(tasks)
        count = 0
        for count, task in enumerate(sought, 1):
            if any(_value(task, key) == id for key in ID_FIELDS):
                return task, f"{self.split}:0:{count - 1}"
        first = f" among its first {count:,}" if count in {MAX_SEARCHED_TASKS, MAX_LISTED_TASKS} else ""
        raise BadRow(f"{self.description} has no task with the ID {id!r}{first}; give an index or the row itself")

    @property
    def _max_searched_tasks(self) -> int:
        """How many tasks are searched."""
        if self.tasks is not None:
            return max(MAX_LISTED_TASKS, len(self.tasks))
        return MAX_SEARCHED_TASKS if self._depends_on_seed else MAX_LISTED_TASKS

    def _limit_time(self, tasks: Iterator[Task]) -> Iterator[Task]:
        """Yield *tasks* until the time limit; raises `UsageError` then."""
        end = monotonic() + self._seconds
        for count, task in enumerate(tasks, 1):
            yield task
            if monotonic() > end:
                raise UsageError(
                    f"{self.description}: the selected task was not found within {self._seconds:g} s"
                    f" ({count:,} tasks read); give the row itself, or a larger `seconds`"
                )


def _value(task: Task, key: str) -> Any:
    return getattr(task, key, None)


def _read_rows(tasks: str | Path | Iterable[Row | Task]) -> Iterable[Row | Task]:
    if isinstance(tasks, (str, Path)):
        return (row for _, row in jsonl.read_rows(Path(tasks)))
    if isinstance(tasks, (Task, Mapping)) or not isinstance(tasks, Iterable):
        raise BadRow(
            f"tasks must be a JSONL file or a list of rows, got {type(tasks).__name__}; wrap a single row in a list"
        )
    return tasks


def _check_split(environment: Environment, split: str | None) -> str:
    if not isinstance(split, (str, NoneType)):
        raise UsageError(
            f"split must be the name of a split, got {split!r}; the splits are {', '.join(environment.splits)}"
        )
    if split is not None:
        if split not in environment.splits:
            environment.tasks(split)  # raises `UnknownSplit` with the nearest name
        return split
    if not environment.splits:
        raise UnknownSplit(f"environment {environment.name!r} has no splits; give tasks with tasks=")
    return "train" if "train" in environment.splits else environment.splits[0]
