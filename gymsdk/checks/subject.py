"""A subject: the environment a check looks at, made anew whenever a check needs one that nobody has touched."""

from __future__ import annotations

import math
import os
import random
import signal
import sys
import time
import warnings
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property, partial
from itertools import islice
from typing import Any, TypeAlias

from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from gymsdk.environment import Environment
from gymsdk.episode import Budget, play
from gymsdk.models.scripted import PolicyFunction, ScriptedModel, build
from gymsdk.plugins.registry import Entry, installed, load
from gymsdk.types import Episode, Item, Model, Rollout, Task

Plain: TypeAlias = "bool | int | float | str | Sequence[Plain] | Mapping[str, Plain] | None"
"""What JSON holds."""

MAX_SHOWN_CHARS = 120
"""Characters of a value that a sentence quotes."""

MAX_DEPTH = 60
"""Levels of a value that are looked at."""

MAX_DIGITS = 4_000
"""Bits of a number that is written out; Python refuses to write very long ones."""

ABSENT = "<not there>"


def to_plain(value: object, above: tuple[int, ...] = ()) -> Plain:
    """Give *value* as plain JSON; of what JSON cannot hold, only the type. It never raises."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Enum):
        return to_plain(value.value, above)
    if isinstance(value, (str, int, float)):
        return _convert_scalar(value)
    if id(value) in above or len(above) > MAX_DEPTH:
        return _name_type(value)
    return _convert_container(value, (*above, id(value)))


def _convert_scalar(value: str | float) -> Plain:
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, float):
        # What is no number must equal itself.
        return float(value) if math.isfinite(value) else float.__repr__(value)
    return int(value) if value.bit_length() < MAX_DIGITS else hex(value)


def _convert_container(value: object, above: tuple[int, ...]) -> Plain:
    if isinstance(value, BaseModel):
        return to_plain(_list_fields(value), above)
    if isinstance(value, Mapping):
        return {_convert_key(key): to_plain(each, above) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(each, above) for each in value]
    if isinstance(value, AbstractSet):
        # Its order is no part of a set.
        return sorted((to_plain(each, above) for each in value), key=repr)
    if isinstance(value, (bytes, bytearray)):
        return bytes(value).hex()
    return _convert_leaf(value)


def _list_fields(model: BaseModel) -> dict[str, object]:
    try:
        return model.model_dump(mode="python", warnings=False)
    except Exception:  # noqa: BLE001  # an author's serializer may raise anything; the fields are there all the same
        return dict(model)


def _convert_leaf(value: object) -> Plain:
    """Give a date, a path, a decimal and their like as pydantic writes them."""
    try:
        written = to_jsonable_python(value)
    except Exception:  # noqa: BLE001  # whatever an author's object raises, it is none that JSON holds
        return _name_type(value)
    return to_plain(written, (id(value),))


def _convert_key(key: object) -> str:
    found = to_plain(key)
    if isinstance(found, list):
        return ",".join(map(str, found))
    return str(found).lower() if isinstance(found, bool) else str(found)


def _name_type(value: object) -> str:
    return f"<{type(value).__name__}>"


def find_difference(one: Plain, other: Plain, where: str = "") -> str | None:
    """Give where *other* first differs from *one* and how, `None` where they are equal: 1 is neither 1.0 nor true."""
    if isinstance(one, dict) and isinstance(other, dict):
        keys = [*one, *(other.keys() - one.keys())]
        return _find_first_difference(((key, one.get(key, ABSENT), other.get(key, ABSENT)) for key in keys), where)
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return _find_first_difference(((str(n), a, b) for n, (a, b) in enumerate(zip(one, other, strict=True))), where)
    if type(one) is type(other) and one == other:
        return None
    return f"{where or 'it'} was {_shorten(one)}, then {_shorten(other)}"


def _find_first_difference(pairs: Iterable[tuple[str, Plain, Plain]], where: str) -> str | None:
    found = (find_difference(one, other, f"{where}.{key}" if where else key) for key, one, other in pairs)
    return next((each for each in found if each), None)


def _shorten(value: Plain) -> str:
    text = "not there" if value is ABSENT else repr(value)
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}…"


def _get_cwd() -> str:
    try:
        return os.getcwd()  # noqa: PTH109  # what is compared is the name
    except FileNotFoundError:
        return "(removed)"


def _get_numpy_state() -> Plain:
    numpy = sys.modules.get("numpy")
    return to_plain(numpy.random.get_state(legacy=False)) if numpy else None


PROCESS_STATE: dict[str, Callable[[], object]] = {
    "os.environ": lambda: dict(os.environ),
    "the current folder": _get_cwd,
    "sys.path": lambda: list(sys.path),
    "the state of the global `random`": random.getstate,
    "the state of the global `numpy.random`": _get_numpy_state,
    "the handler of SIGINT": partial(signal.getsignal, signal.SIGINT),
    "the handler of SIGTERM": partial(signal.getsignal, signal.SIGTERM),
    "the handler of SIGALRM": partial(signal.getsignal, signal.SIGALRM),
    "warnings.filters": lambda: list(warnings.filters),
}
"""What belongs to the whole process: no episode may change it."""


def read_process_state() -> dict[str, object]:
    """Give what belongs to the whole process, as it is now."""
    return {name: look() for name, look in PROCESS_STATE.items()}


@contextmanager
def restore_process_state() -> Iterator[None]:
    """Put the variables, the folder and the path back as they were before the block.

    What an episode changes once and for all would otherwise be found by nobody: the first to look finds it changed.
    """
    variables, folder, path = dict(os.environ), _get_cwd(), list(sys.path)
    try:
        yield
    finally:
        _restore_paths(variables, folder, path)


def _restore_paths(variables: dict[str, str], folder: str, path: list[str]) -> None:
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    os.environ.update({name: value for name, value in variables.items() if os.environ.get(name) != value})
    if os.path.isdir(folder) and _get_cwd() != folder:  # noqa: PTH112  # as above
        os.chdir(folder)
    if sys.path != path:
        sys.path[:] = path


@contextmanager
def perturb_generators() -> Iterator[None]:
    """Put the global generators where no episode has left them: one that seeds them as before changes nothing else."""
    generators = (random, numpy.random) if (numpy := sys.modules.get("numpy")) else (random,)
    kept = [random.getstate(), *(each.get_state() for each in generators[1:])]
    for each in generators:
        each.seed(int.from_bytes(os.urandom(4), "big"))
    try:
        yield
    finally:
        random.setstate(kept[0])
        for each, state in zip(generators[1:], kept[1:], strict=True):
            each.set_state(state)


EPISODE_SECONDS = 20.0
"""Seconds one episode of a policy that understands nothing may take."""

BRIEF_TURNS = 16
"""Turns such a policy is let play."""

CHECK_SECONDS = 30.0
"""Seconds that the episodes of one check should take together."""

QUICK_SECONDS = 0.2
"""Seconds of an episode that is measured once: a slower one may only have been the first."""


TIME_SHARE = 0.8
"""The share of a check's time that what is planned may take."""


class TooSlow(Exception):
    """Episodes take so long that a check cannot play enough of them; the message says what it would have needed."""


class RecordingModel:
    """A *model* whose *turns* are written down: where a step says nothing, a transcript does not tell two apart."""

    def __init__(self, model: Model) -> None:
        self.turns: list[list[Item]] = []
        self._model = model

    async def respond(self, request: Item, *, episode: Episode | None = None) -> Item:
        """Answer as the model does."""
        response = await self._model.respond(request, episode=episode)
        self.turns.append(response["output"])
        return response


@dataclass(frozen=True, slots=True)
class Play:
    """How one task was played: the *turns* that were taken, and the *rollout* that came of them."""

    turns: tuple[list[Item], ...]
    rollout: Rollout


@dataclass
class Subject:
    """One environment under check: *make* gives a new `Environment` each time, with the settings asked for.

    *count* tasks of each split, or of the one *split*, are looked at, drawn with *seed*; *given* ones instead, where
    there are any. *entry* is how it is installed, `None` where not, *settings* what it is loaded with. *budget* is
    that of the best plays, *patience* how many seconds the episodes of a check should take, *ends* when the check that
    looks has to be over, on the clock of `time.monotonic`.
    """

    name: str
    make: Callable[[], Environment]
    entry: Entry | None = None
    seed: int = 0
    count: int = 8
    split: str | None = None
    given: Sequence[Task] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    budget: Budget = field(default_factory=Budget)
    check_seconds: float = CHECK_SECONDS
    deadline: float = math.inf
    episode_seconds: float | None = None

    @cached_property
    def environment(self) -> Environment:
        """An environment for questions that leave no trace: splits, tasks, schemas, claims."""
        return self.make()

    @property
    def splits(self) -> Sequence[str]:
        """The splits that are looked at."""
        return self.environment.splits if self.split is None else [self.split]

    @cached_property
    def tasks(self) -> list[Task]:
        """The tasks that are looked at: *count* of each split, or those given."""
        if self.given is not None:
            return list(self.given)
        return [
            task for split in self.splits for task in islice(self.environment.tasks(split, seed=self.seed), self.count)
        ]

    @cached_property
    def brief_budget(self) -> Budget:
        """What a policy that understands nothing may use."""
        own = self.budget
        return Budget(
            turns=min(BRIEF_TURNS, own.turns),
            tools=min(4 * BRIEF_TURNS, own.tools),
            seconds=min(EPISODE_SECONDS, own.seconds),
        )

    @property
    def seconds_left(self) -> float:
        """Seconds that the check has left."""
        return self.deadline - time.monotonic()

    async def count_affordable(self, environment: Environment, wanted: int, *, each: float, least: int = 1) -> int:
        """Give how many of *wanted* rounds of *each* so many episodes there is time for; raises `TooSlow`."""
        if self.episode_seconds is None:
            self.episode_seconds = await self._measure_episode(environment)
        cost = max(self.episode_seconds * each, 1e-9)
        least = min(least, wanted)
        if cost * least > TIME_SHARE * self.seconds_left:
            raise TooSlow(
                f"an episode takes {self.episode_seconds:.1f} s, so the {math.ceil(each * least)} it needs at least take about"
                f" {cost * least:.0f} s; it had {max(self.seconds_left, 0):.0f} s"
            )
        return min(wanted, max(least, int(self.check_seconds / cost)))

    async def _measure_episode(self, environment: Environment) -> float:
        """Give the seconds of an episode, one that says nothing or one played well, whichever takes longer."""
        if not self.tasks:
            return 0.0
        policies = (build("null"), build("oracle"))
        first = max([await self._time_episode(environment, policy) for policy in policies])
        if first < QUICK_SECONDS:
            return first
        return max([await self._time_episode(environment, policy) for policy in policies])

    async def _time_episode(self, environment: Environment, policy: Model) -> float:
        started = time.perf_counter()
        # A verifier may change the task it is given; that is for another check to find.
        await self.play(environment, policy, self.tasks[0].model_copy(deep=True))
        return time.perf_counter() - started

    @asynccontextmanager
    async def enter_environment(self) -> AsyncIterator[Environment]:
        """Enter a new environment; what playing it changes in the process is put back."""
        environment = self.make()
        with restore_process_state():
            async with environment:
                yield environment

    async def play_oracle(self, environment: Environment, task: Task) -> Play:
        """Play *task* as its `solve` says."""
        model = RecordingModel(build("oracle"))
        rollout = await self.play(environment, model, task)
        return Play(tuple(model.turns), rollout)

    async def play_script(
        self, environment: Environment, choose: PolicyFunction, task: Task, *, turns: int = 0
    ) -> Rollout:
        """Play *task* with a policy that *choose* scripts, briefly, though at least so many *turns*."""
        brief = self.brief_budget.model_copy(update={"turns": max(self.brief_budget.turns, turns)})
        return await self.play(environment, ScriptedModel("told", choose), task, budget=brief)

    async def play(
        self, environment: Environment, model: Model, task: Task, *, budget: Budget | None = None
    ) -> Rollout:
        """Play *task* once, bounded."""
        return await play(environment, model, task, seed=self.seed, budget=budget or self.budget)


def build_subject(
    name: str,
    settings: Mapping[str, Any],
    *,
    seed: int = 0,
    count: int = 8,
    split: str | None = None,
    budget: Budget | None = None,
) -> Subject:
    """Give the installed environment *name* as a subject; raises `UnknownEnvironment`."""
    entry = installed().get(name)
    if entry is None:
        load(name)
    made = partial(load, name, **settings)
    return Subject(name, made, entry, seed, count, split, settings=settings, budget=budget or Budget())
