"""What `Env` and `VectorEnv` play: the environment, its tasks, the codec, the budget; and the options of `reset`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from pydantic import ValidationError

from gymsdk import errors
from gymsdk.environment import Environment
from gymsdk.episode import Budget
from gymsdk.errors import BadConfig, UsageError, format_suggestion
from gymsdk.gym.codecs import Codec, build_codec
from gymsdk.gym.sampler import SEED_BOUND, TaskSampler
from gymsdk.plugins import registry
from gymsdk.tokens.tokenizer import Tokenizer
from gymsdk.types import Row, Task

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
    return [None if each is None else int(each) for each in seed]


def _is_seed(seed: object) -> bool:
    return seed is None or isinstance(seed, Integral)


def _to_python_value(task: Any) -> Any:
    # The elements of an array are NumPy scalars.
    return task.item() if isinstance(task, np.generic) else task


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
        codec: The name of the codec.
        tokenizer: The tokenizer of the codec `tokens`.
        budget: The limits of an episode.

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
        tokenizer: Tokenizer | str | None = None,
        budget: Budget | None = None,
    ) -> None:
        self.environment = _load_environment(environment, settings or {})
        self.budget = budget or Budget()
        self.sampler = TaskSampler(self.environment, split=split, tasks=tasks, seconds=self.budget.seconds)
        self._codec_arguments = codec, tokenizer
        self._entered = False

    def codec(self) -> Codec:
        """Return a new codec for one slot."""
        return build_codec(*self._codec_arguments)

    def choose_episode(
        self, rng: np.random.Generator, *, seed: int | None, options: Mapping[str, Any] | None
    ) -> EpisodeStart:
        """Return the task and the seed of the next episode: those in *options*, or drawn with *rng*."""
        wanted = _check_reset_options(check_options(options))
        own = int(rng.integers(SEED_BOUND)) if seed is None else int(seed)
        task, split = wanted.get("task"), wanted.get("split")
        if task is not None:
            return EpisodeStart(*self.sampler.find(task, split), own)
        return EpisodeStart(*(self.sampler.draw(rng) if split is None else self.sampler.draw_from(split, rng)), own)

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
    if settings is not None and not _has_string_keys(settings):
        raise BadConfig(f"`settings` must be a dict of the environment's settings by name, got {settings!r}")
    if twice := sorted((settings or {}).keys() & config.keys()):
        raise BadConfig(f"the setting {twice[0]!r} is given twice; give it in `settings` or as an argument, not both")
    return {**(settings or {}), **config}


def _has_string_keys(settings: object) -> bool:
    return isinstance(settings, Mapping) and all(isinstance(key, str) for key in settings)


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
            near = format_suggestion(str(key), RESET_OPTIONS, f"the options are {', '.join(RESET_OPTIONS)}")
            raise UsageError(f"reset has no option {key!r}{near}")
    if not isinstance(options.get("split"), (str, NoneType)):
        raise UsageError(f"options['split'] must be the name of a split, got {options['split']!r}")
    return options
