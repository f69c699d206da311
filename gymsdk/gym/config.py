"""The table: what `Env` and `VectorEnv` play at: an environment, its deck of tasks, its codec, an episode's budget."""

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
from gymsdk.gym.codecs import Codec, codec
from gymsdk.gym.sampler import SEEDS, Deck
from gymsdk.plugins import registry
from gymsdk.tokens.tokenizer import Tokenizer
from gymsdk.types import Row, Task

Seeds: TypeAlias = int | Sequence[int | None] | None
"""One seed, from which the seats count on, or each seat's own."""


class Wish(NamedTuple):
    """The seed and the options one seat is reset with."""

    seed: int | None
    options: Mapping[str, Any]


def wishes(size: int, seed: Seeds, options: Mapping[str, Any] | None) -> dict[int, Wish]:
    """Give what is asked of each of *size* seats, by its index; one that `reset_mask` leaves out is not among them.

    A list under `task` has one for each seat. Raises `UsageError`.
    """
    shared = dict(mapping(options))
    chosen = _chosen(shared.pop("reset_mask"), size) if "reset_mask" in shared else range(size)
    seeds, tasks = _seeds(seed, size), shared.get("task")
    if not isinstance(tasks, (list, tuple, np.ndarray)):
        return {index: Wish(seeds[index], shared) for index in chosen}
    if len(tasks) != size:
        raise UsageError(f"options['task'] is one task or one for each of {size} seats; this list has {len(tasks)}")
    return {index: Wish(seeds[index], shared | {"task": _task(tasks[index])}) for index in chosen}


def mapping(options: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Give the *options* of a reset, an empty dict where there are none; raises `UsageError` where they are no dict."""
    if options is not None and not isinstance(options, Mapping):
        raise UsageError(f"the options of reset are a dict, as in options={{'task': 3}}, not {options!r}")
    return {} if options is None else options


def _chosen(mask: object, size: int) -> list[int]:
    if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_ or mask.shape != (size,):
        raise UsageError(f"options['reset_mask'] is a boolean array with one value for each of {size} seats")
    if not mask.any():
        raise UsageError("options['reset_mask'] resets no seat; set at least one of its values")
    return [int(index) for index in np.flatnonzero(mask)]


def _seeds(seed: Seeds, size: int) -> list[int | None]:
    if seed is None:
        return [None] * size
    if isinstance(seed, Integral):
        return [int(seed) + index for index in range(size)]
    if not isinstance(seed, (list, tuple, np.ndarray)) or len(seed) != size or not all(map(_is_seed, seed)):
        raise UsageError(f"seed is a whole number, or a list of one (or None) for each of {size} seats, not {seed!r}")
    return [None if each is None else int(each) for each in seed]


def _is_seed(seed: object) -> bool:
    return seed is None or isinstance(seed, Integral)


def _task(task: Any) -> Any:
    # What comes out of an array of names or numbers is NumPy's own kind of each.
    return task.item() if isinstance(task, np.generic) else task


OPTIONS = ("task", "split")
"""What `reset(options=...)` may hold."""

Tasks = str | Path | Iterable[Row | Task]
"""Tasks given instead of a split: a JSONL file, or rows."""


class Dealt(NamedTuple):
    """What an episode is opened with."""

    task: Task
    id: str
    seed: int


class Table:
    """One environment set up for play, in the process it was set up in.

    *environment* is an installed one's name, with its *settings*, or an `Environment`. `enter` and `leave` are
    coroutines of the background loop; all else may be called anywhere. Raises `UsageError`.
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
        self.environment = _loaded(environment, settings or {})
        self.budget = budget or Budget()
        self.deck = Deck(self.environment, split=split, given=tasks, seconds=self.budget.seconds)
        self._speech = codec, tokenizer
        self._entered = False

    def codec(self) -> Codec:
        """Give a codec for one seat."""
        return codec(*self._speech)

    def deal(self, rng: np.random.Generator, *, seed: int | None, options: Mapping[str, Any] | None) -> Dealt:
        """Give what the next episode is opened with: what *options* name, the rest drawn."""
        wanted = _checked(mapping(options))
        own = int(rng.integers(SEEDS)) if seed is None else int(seed)
        task, split = wanted.get("task"), wanted.get("split")
        if task is not None:
            return Dealt(*self.deck.named(task, split), own)
        return Dealt(*(self.deck.draw(rng) if split is None else self.deck.elsewhere(split, rng)), own)

    async def enter(self) -> None:
        """Enter the environment's lifespan, unless that has been done."""
        if not self._entered:
            await self.environment.__aenter__()
            self._entered = True

    async def leave(self) -> None:
        """Leave the environment's lifespan, where it was entered; `enter` may follow."""
        entered, self._entered = self._entered, False
        if entered:
            await self.environment.__aexit__()

    def anew(self) -> Table:
        """Give the same table set up in this process: nothing that runs survives a fork."""
        old = self.environment
        environment = Environment(old.name, old.plugin, dict(old.config), version=old.version)
        codec, tokenizer = self._speech
        return Table(environment, codec=codec, tokenizer=tokenizer, budget=self.budget, **self.deck.origin)


def budget(*, turns: int, tools: int, seconds: float) -> Budget:
    """Give the budget of an episode; raises `UsageError`."""
    for name, value in {"turns": turns, "tools": tools, "seconds": seconds}.items():
        if isinstance(value, bool) or not isinstance(value, Real):
            raise UsageError(f"an episode's budget: {name} is a number, not {value!r}; write it without quotes")
    try:
        return Budget(turns=turns, tools=tools, seconds=seconds)
    except ValidationError as error:
        raise UsageError(f"an episode's budget: {errors.format_validation_error(error)}") from None


def merged(settings: Mapping[str, Any] | None, config: Mapping[str, Any]) -> dict[str, Any]:
    """Give an environment's settings, stated in either way; raises `BadConfig` where one is stated twice."""
    if settings is not None and not _is_by_name(settings):
        raise BadConfig(f"`settings` is a dict of the environment's settings by name, not {settings!r}")
    if twice := sorted((settings or {}).keys() & config.keys()):
        raise BadConfig(f"the setting {twice[0]!r} is given twice; state it in `settings` or by itself")
    return {**(settings or {}), **config}


def _is_by_name(settings: object) -> bool:
    return isinstance(settings, Mapping) and all(isinstance(key, str) for key in settings)


def _loaded(environment: str | Environment, settings: Mapping[str, Any]) -> Environment:
    if isinstance(environment, str):
        return registry.load(environment, **settings)
    if not isinstance(environment, Environment):
        raise UsageError(f"an environment is a name or a gymsdk.Environment, not {type(environment).__name__}")
    if settings:
        known = ", ".join(settings)
        raise BadConfig(f"environment {environment.name!r} is made already; give {known} where it is made")
    return environment


def _checked(options: Mapping[str, Any]) -> Mapping[str, Any]:
    for key in options:
        if key not in OPTIONS:
            near = format_suggestion(str(key), OPTIONS, f"its options: {', '.join(OPTIONS)}")
            raise UsageError(f"reset has no option {key!r}{near}")
    if not isinstance(options.get("split"), (str, NoneType)):
        raise UsageError(f"options['split'] is the name of a split, not {options['split']!r}")
    return options
