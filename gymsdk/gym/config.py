"""What `Env` and `VectorEnv` play: the environment, its tasks, the codec, the budget; and the options of `reset`."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from numbers import Integral, Real
from pathlib import Path
from time import monotonic
from types import NoneType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from pydantic import ValidationError

from gymsdk import errors, jsonl
from gymsdk.environment import Environment
from gymsdk.errors import BadConfig, BadRow, UnknownSplit, UsageError, describe_value, format_suggestion
from gymsdk.gym.codecs import Codec, PromptEncoder, build_codec
from gymsdk.plugins import registry
from gymsdk.plugins.calls import DEFAULT_STAGE_SECONDS
from gymsdk.tokens.tokenizer import Tokenizer
from gymsdk.types import Budget, Row, Task

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
        self._known_tasks: Sequence[Task] | None = self.tasks
        self.split = GIVEN_SPLIT if self.tasks is not None else _check_split(environment, split)
        self._other_samplers: dict[str, TaskSampler] = {}

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
        if split not in self._other_samplers:
            self._other_samplers[split] = TaskSampler(self._environment, split=split, seconds=self._seconds)
        return self._other_samplers[split]

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
        return self._known_tasks or self._read_all(self._environment.tasks(self.split))

    def _read_all(self, tasks: Iterator[Task]) -> Sequence[Task]:
        """List the *tasks* of a split that does not depend on the seed, and keep the list."""
        listed_tasks = list(islice(tasks, MAX_LISTED_TASKS))
        if not listed_tasks:
            raise UnknownSplit(f"{self.description} has no task")
        if len(listed_tasks) == MAX_LISTED_TASKS and next(tasks, None) is not None:
            log.warning(
                "%s does not depend on the seed and has more than %d tasks; only the first %d are drawn from. "
                "If the split is endless, let its tasks depend on the seed",
                self.description,
                MAX_LISTED_TASKS,
                MAX_LISTED_TASKS,
            )
        self._known_tasks = listed_tasks
        return listed_tasks

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
        if self._known_tasks is not None:
            matches = self._known_tasks[index : index + 1]
        else:
            tasks = self._environment.tasks(self.split, seed=seed)
            matches = [*islice(self._limit_time(tasks), index, index + 1)]
        for task in matches:
            return task, f"{self.split}:{seed}:{index}"
        raise BadRow(f"{self.description} has no task {index}; indices start at 0")

    def _find_by_id(self, id: str, split: str) -> tuple[Task, str]:
        match = TASK_ID_PATTERN.fullmatch(id)
        if match and match[1] in {*self._environment.splits, self.split}:
            return self._sampler_for(match[1]).get_by_index(int(match[3]), seed=int(match[2]))
        return self._sampler_for(split).get_by_id(id)

    def get_by_id(self, id: str) -> tuple[Task, str]:
        """Return the task whose row has the ID *id*; raises `BadRow`."""
        candidates: Iterable[Task] = self._known_tasks or ()
        if not candidates:
            tasks = self._limit_time(self._environment.tasks(self.split))
            candidates = islice(tasks, MAX_SEARCHED_TASKS) if self._depends_on_seed else self._read_all(tasks)
        count = 0
        for count, task in enumerate(candidates, 1):
            if any(getattr(task, key, None) == id for key in ID_FIELDS):
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


Seeds: TypeAlias = int | Sequence[int | None] | None
"""One seed for the first slot, from which the others count up, or one seed per slot."""


class SlotReset(NamedTuple):
    """The seed and the options with which one slot is reset."""

    seed: int | None
    options: Mapping[str, Any]


def parse_slot_resets(size: int, seed: Seeds, options: Mapping[str, Any] | None) -> dict[int, SlotReset]:
    """Return the seed and the options of each slot to reset, by its index.

    Args:
        size: The number of slots.
        seed: See `Seeds`.
        options: The options of `reset`: a list under `task` has one task per slot, and the boolean array `reset_mask`
            selects the slots.

    Raises:
        UsageError: The seed or an option is invalid.
    """
    shared = dict(check_options(options))
    chosen = _parse_reset_mask(shared.pop("reset_mask"), size) if "reset_mask" in shared else range(size)
    seeds, tasks = _parse_seeds(seed, size), shared.get("task")
    if not isinstance(tasks, (list, tuple, np.ndarray)):
        return {index: SlotReset(seeds[index], shared) for index in chosen}
    if len(tasks) != size:
        raise UsageError(
            f"options['task'] must be one task or a list of {size}, one per slot; got a list of {len(tasks)}"
        )
    return {index: SlotReset(seeds[index], shared | {"task": _to_python_value(tasks[index])}) for index in chosen}


def check_options(options: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return *options*, or an empty dict for `None`; raises `UsageError` if they are not a mapping."""
    if options is not None and not isinstance(options, Mapping):
        raise UsageError(f"the options of reset must be a dict, as in options={{'task': 3}}; got {options!r}")
    return {} if options is None else options


def _parse_reset_mask(mask: object, size: int) -> list[int]:
    if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_ or mask.shape != (size,):
        raise UsageError(f"options['reset_mask'] must be a boolean array of {size} values, one per slot")
    if not mask.any():
        raise UsageError("options['reset_mask'] selects no slot; set at least one value to True")
    return [int(index) for index in np.flatnonzero(mask)]


def _parse_seeds(seed: Seeds, size: int) -> list[int | None]:
    if seed is None:
        return [None] * size
    if isinstance(seed, Integral):
        return [int(seed) + index for index in range(size)]
    if not isinstance(seed, (list, tuple, np.ndarray)) or len(seed) != size or not all(map(_is_seed, seed)):
        raise UsageError(f"seed must be an integer or a list of {size} integers or None, one per slot; got {seed!r}")
    return [None if slot_seed is None else int(slot_seed) for slot_seed in seed]


def _is_seed(seed: object) -> bool:
    return seed is None or isinstance(seed, Integral)


def _to_python_value(value: Any) -> Any:
    # The elements of an array are NumPy scalars.
    return value.item() if isinstance(value, np.generic) else value


RESET_OPTIONS = ("task", "split")
"""The options of `reset`."""

Tasks = str | Path | Iterable[Row | Task]
"""Tasks to play instead of a split: the path of a JSONL file, or rows."""


class EpisodeStart(NamedTuple):
    """The task, the task ID and the seed of an episode."""

    task: Task
    id: str
    seed: int


class EnvConfig:
    """An environment, its tasks, its codec and the budget of an episode.

    `enter` and `leave` are coroutines for the background loop. Other methods may be called from any thread.

    Args:
        environment: The name of an installed environment, or an `Environment`.
        settings: Settings of the environment, if it is given by name.
        split: The split that the tasks come from.
        tasks: The tasks to play instead of a split.

    Raises:
        UsageError: An argument is invalid.
    """

    def __init__(
        self,
        environment: str | Environment,
        *,
        settings: Mapping[str, Any] | None = None,
        split: str | None = None,
        tasks: Tasks | None = None,
        codec: str = "chat",
        tokenizer: PromptEncoder | Tokenizer | str | None = None,
        budget: Budget | None = None,
    ) -> None:
        self.environment = _load_environment(environment, settings or {})
        self.budget = budget or Budget()
        self.sampler = TaskSampler(self.environment, split=split, tasks=tasks, seconds=self.budget.seconds)
        self._codec_arguments: tuple[str, PromptEncoder | Tokenizer | str | None] = codec, tokenizer
        self._entered = False

    def codec(self) -> Codec:
        """Return a new codec for one slot. The codecs of all slots share one encoder of prompts."""
        name, tokenizer = self._codec_arguments
        if name == "tokens" and not isinstance(tokenizer, PromptEncoder):
            tokenizer = PromptEncoder(tokenizer)
            self._codec_arguments = name, tokenizer
        return build_codec(name, tokenizer)

    def choose_episode(
        self, rng: np.random.Generator, *, seed: int | None, options: Mapping[str, Any] | None
    ) -> EpisodeStart:
        """Return the task and the seed of the next episode: those in *options*, or drawn with *rng*."""
        wanted = _check_reset_options(check_options(options))
        episode_seed = int(rng.integers(SEED_BOUND)) if seed is None else int(seed)
        task, split = wanted.get("task"), wanted.get("split")
        if task is not None:
            return EpisodeStart(*self.sampler.find(task, split), episode_seed)
        return EpisodeStart(
            *(self.sampler.draw(rng) if split is None else self.sampler.draw_from(split, rng)), episode_seed
        )

    async def enter(self) -> None:
        """Enter the environment's lifespan, unless it is entered."""
        if not self._entered:
            await self.environment.__aenter__()
            self._entered = True

    async def leave(self) -> None:
        """Leave the environment's lifespan if it is entered; `enter` may enter it again."""
        entered, self._entered = self._entered, False
        if entered:
            await self.environment.__aexit__()

    def rebuild(self) -> EnvConfig:
        """Return the same configuration with a new `Environment`, for a forked process."""
        old = self.environment
        environment = Environment(old.name, old.plugin, dict(old.config), version=old.version)
        codec, tokenizer = self._codec_arguments
        return EnvConfig(environment, codec=codec, tokenizer=tokenizer, budget=self.budget, **self.sampler.origin)


def build_budget(*, turns: int, tools: int, seconds: float) -> Budget:
    """Return the budget of an episode; raises `UsageError`."""
    for name, value in {"turns": turns, "tools": tools, "seconds": seconds}.items():
        if isinstance(value, bool) or not isinstance(value, Real):
            raise UsageError(f"an episode's budget: {name} must be a number, got {value!r}")
    try:
        return Budget(turns=turns, tools=tools, seconds=seconds)
    except ValidationError as error:
        raise UsageError(f"an episode's budget: {errors.format_validation_error(error)}") from None


def merge_settings(settings: Mapping[str, Any] | None, config: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the settings given as a dict and by keyword; raises `BadConfig` if one setting is given twice."""
    is_mapping = isinstance(settings, Mapping) and all(isinstance(key, str) for key in settings)
    if settings is not None and not is_mapping:
        raise BadConfig(
            f"`settings` must be a dict of the environment's settings by name, got {describe_value(settings)}"
        )
    if twice := sorted((settings or {}).keys() & config.keys()):
        raise BadConfig(f"the setting {twice[0]!r} is given twice; give it in `settings` or as an argument, not both")
    return {**(settings or {}), **config}


def _load_environment(environment: str | Environment, settings: Mapping[str, Any]) -> Environment:
    if isinstance(environment, str):
        return registry.load(environment, **settings)
    if not isinstance(environment, Environment):
        raise UsageError(f"environment must be a name or a gymsdk.Environment, got {type(environment).__name__}")
    if settings:
        names = ", ".join(settings)
        raise BadConfig(
            f"the Environment {environment.name!r} has its settings already; pass {names} when you create it"
        )
    return environment


def _check_reset_options(options: Mapping[str, Any]) -> Mapping[str, Any]:
    for key in options:
        if key not in RESET_OPTIONS:
            suggestion = format_suggestion(str(key), RESET_OPTIONS, f"the options are {', '.join(RESET_OPTIONS)}")
            raise UsageError(f"reset has no option {key!r}{suggestion}")
    if not isinstance(options.get("split"), (str, NoneType)):
        raise UsageError(f"options['split'] must be the name of a split, got {options['split']!r}")
    return options
