"""The environment under check, and how checks play it."""

from __future__ import annotations

import math
import os
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

from gymsdk.checks.generators import read_generator_states
from gymsdk.checks.judges import AnswerLog, record_models
from gymsdk.environment import Environment
from gymsdk.episode import play
from gymsdk.models.scripted import PolicyFunction, ScriptedModel, build
from gymsdk.plugins.registry import Entry, installed, load
from gymsdk.types import Budget, Episode, Item, Model, Rollout, Task
from gymsdk.working_folder import describe_left_folders

Plain: TypeAlias = "bool | int | float | str | Sequence[Plain] | Mapping[str, Plain] | None"
"""A value that JSON can represent."""

MAX_SHOWN_CHARS = 120
"""How many characters of a value a sentence quotes."""

MAX_DEPTH = 60
"""How many levels of a value are converted."""

MAX_DIGITS = 4_000
"""Integers with more bits are written in hexadecimal, because Python refuses to print very long decimals."""

ABSENT = "<not there>"

EPISODE_SECONDS = 20.0
"""Time limit of an episode of a policy without understanding."""

BRIEF_TURNS = 16
"""Turn budget of such a policy."""

CHECK_SECONDS = 30.0
"""Seconds that the episodes of one check should take together."""

QUICK_SECONDS = 0.2
"""If the first episode is slower than this, a second one is measured, because first episodes load things."""

TIME_SHARE = 0.8
"""The share of a check's time limit that its planned episodes may take."""


class TooSlow(Exception):
    """Episodes take too long for a check to play enough of them; the message says how long they would take."""


class RecordingModel:
    """A model that records the turns it plays. A transcript cannot separate turns if a step answers nothing."""

    def __init__(self, model: Model) -> None:
        self.turns: list[list[Item]] = []
        self._model = model

    async def respond(self, request: Item, *, episode: Episode | None = None) -> Item:
        """Ask the model and record its response."""
        response = await self._model.respond(request, episode=episode)
        self.turns.append(response["output"])
        return response


@dataclass(frozen=True, slots=True)
class Play:
    """The turns of one play of a task, and the rollout."""

    turns: tuple[list[Item], ...]
    rollout: Rollout


@dataclass
class Subject:
    """The environment under check.

    Attributes:
        name: The name of the environment.
        make: Creates a new `Environment` with the settings.
        entry: The installed entry point, or `None`.
        seed: The seed of tasks and episodes.
        count: How many tasks of each split are checked.
        split: The only split to check, or `None` for all.
        file_tasks: Tasks to check instead of those of the splits.
        settings: The settings of the environment.
        budget: The budget of the oracle's episodes.
        check_seconds: How long the episodes of one check should take together.
        deadline: When the running check must end, on the clock of `time.monotonic`.
        episode_seconds: The measured duration of an episode.
    """

    name: str
    make: Callable[[], Environment]
    entry: Entry | None = None
    seed: int = 0
    count: int = 8
    split: str | None = None
    file_tasks: Sequence[Task] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    budget: Budget = field(default_factory=Budget)
    check_seconds: float = CHECK_SECONDS
    deadline: float = math.inf
    episode_seconds: float | None = None

    @cached_property
    def answers(self) -> AnswerLog:
        """The answers of the models that the environments of this subject have asked."""
        return AnswerLog()

    def make_recorded(self) -> Environment:
        """Create a new environment whose models record their answers."""
        return record_models(self.make(), self.answers)

    @cached_property
    def environment(self) -> Environment:
        """An environment for queries without side effects: splits, tasks, schemas, claims."""
        return self.make()

    @property
    def splits(self) -> Sequence[str]:
        """The splits to check."""
        return self.environment.splits if self.split is None else [self.split]

    @cached_property
    def tasks(self) -> list[Task]:
        """The tasks to check: *count* of each split, or those of a file."""
        if self.file_tasks is not None:
            return list(self.file_tasks)
        return [
            task for split in self.splits for task in islice(self.environment.tasks(split, seed=self.seed), self.count)
        ]

    @cached_property
    def brief_budget(self) -> Budget:
        """The budget of a policy without understanding."""
        budget = self.budget
        return Budget(
            turns=min(BRIEF_TURNS, budget.turns),
            tools=min(4 * BRIEF_TURNS, budget.tools),
            seconds=min(EPISODE_SECONDS, budget.seconds),
        )

    @property
    def seconds_left(self) -> float:
        """The seconds that the running check has left."""
        return self.deadline - time.monotonic()

    async def count_affordable(self, environment: Environment, rounds: int, *, episodes: float, least: int = 1) -> int:
        """Return how many of *rounds* rounds of so many *episodes* fit into the time of the check.

        Raises:
            TooSlow: Not even *least* rounds fit.
        """
        if self.episode_seconds is None:
            self.episode_seconds = await self._measure_episode(environment)
        cost = max(self.episode_seconds * episodes, 1e-9)
        least = min(least, rounds)
        if cost * least > TIME_SHARE * self.seconds_left:
            raise TooSlow(
                f"an episode takes {self.episode_seconds:.1f} s, so the required {math.ceil(episodes * least)} episodes"
                f" take about {cost * least:.0f} s; the check had {max(self.seconds_left, 0):.0f} s"
            )
        return min(rounds, max(least, int(self.check_seconds / cost)))

    async def _measure_episode(self, environment: Environment) -> float:
        """Return the duration of an episode in seconds: the longer of one without a reply and one of the oracle."""
        if not self.tasks:
            return 0.0
        policies = (build("null"), build("oracle"))
        first = max([await self._time_episode(environment, policy) for policy in policies])
        if first < QUICK_SECONDS:
            return first
        return max([await self._time_episode(environment, policy) for policy in policies])

    async def _time_episode(self, environment: Environment, policy: Model) -> float:
        started = time.perf_counter()
        # A verifier may change the task; another check reports that.
        await self.play(environment, policy, self.tasks[0].model_copy(deep=True))
        return time.perf_counter() - started

    @asynccontextmanager
    async def enter_environment(self) -> AsyncIterator[Environment]:
        """Enter a new environment, and restore the process state that playing it changes."""
        environment = self.make_recorded()
        with restore_process_state():
            async with environment:
                yield environment

    async def play_oracle(self, environment: Environment, task: Task) -> Play:
        """Play *task* as its `solve` hook says."""
        model = RecordingModel(build("oracle"))
        rollout = await self.play(environment, model, task)
        return Play(tuple(model.turns), rollout)

    async def play_script(
        self, environment: Environment, choose: PolicyFunction, task: Task, *, turns: int = 0
    ) -> Rollout:
        """Play *task* with the scripted policy *choose* on the brief budget, extended to *turns* turns."""
        brief = self.brief_budget.model_copy(update={"turns": max(self.brief_budget.turns, turns)})
        return await self.play(environment, ScriptedModel("script", choose), task, budget=brief)

    async def play(
        self, environment: Environment, model: Model, task: Task, *, budget: Budget | None = None
    ) -> Rollout:
        """Play *task* once within a budget."""
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
    """Return the installed environment *name* as a subject. Raises `UnknownEnvironment`."""
    entry = installed().get(name)
    if entry is None:
        # Raises the error with the nearest name.
        load(name)
    make = partial(load, name, **settings)
    return Subject(name, make, entry, seed, count, split, settings=settings, budget=budget or Budget())


def to_plain(value: object, above: tuple[int, ...] = ()) -> Plain:
    """Return *value* as plain JSON. A value that JSON cannot represent becomes the name of its type. Never raises."""
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
        # The methods of the built-in types: an author's subclass may override them.
        return str.__str__(value)
    if isinstance(value, float):
        # `nan` does not equal itself; its text does.
        return float(value) if math.isfinite(value) else float.__repr__(value)
    return int(value) if value.bit_length() < MAX_DIGITS else hex(value)


def _convert_container(value: object, above: tuple[int, ...]) -> Plain:
    if isinstance(value, BaseModel):
        return to_plain(_list_fields(value), above)
    if isinstance(value, Mapping):
        return {_convert_key(key): to_plain(element, above) for key, element in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(element, above) for element in value]
    if isinstance(value, AbstractSet):
        # A set has no order.
        return sorted((to_plain(element, above) for element in value), key=repr)
    if isinstance(value, (bytes, bytearray)):
        return bytes(value).hex()
    return _convert_leaf(value)


def _list_fields(model: BaseModel) -> dict[str, object]:
    try:
        return model.model_dump(mode="python", warnings=False)
    except Exception:  # noqa: BLE001  # an author's serializer may raise anything; the fields are readable anyway
        return dict(model)


def _convert_leaf(value: object) -> Plain:
    """Return dates, paths, decimals and similar values as pydantic writes them."""
    try:
        written = to_jsonable_python(value)
    except Exception:  # noqa: BLE001  # JSON cannot represent an object whose serialisation raises
        return _name_type(value)
    return to_plain(written, (id(value),))


def _convert_key(key: object) -> str:
    converted = to_plain(key)
    if isinstance(converted, list):
        return ",".join(map(str, converted))
    return str(converted).lower() if isinstance(converted, bool) else str(converted)


def _name_type(value: object) -> str:
    return f"<{type(value).__name__}>"


def find_difference(first: Plain, other: Plain, path: str = "") -> str | None:
    """Return where and how *other* first differs from *first*, or `None`. The values 1, 1.0 and true differ."""
    if isinstance(first, dict) and isinstance(other, dict):
        keys = [*first, *(other.keys() - first.keys())]
        return _find_first_difference(((key, first.get(key, ABSENT), other.get(key, ABSENT)) for key in keys), path)
    if isinstance(first, list) and isinstance(other, list) and len(first) == len(other):
        return _find_first_difference(((str(n), a, b) for n, (a, b) in enumerate(zip(first, other, strict=True))), path)
    if type(first) is type(other) and first == other:
        return None
    return f"{path or 'it'} was {_shorten(first)}, then {_shorten(other)}"


def _find_first_difference(pairs: Iterable[tuple[str, Plain, Plain]], path: str) -> str | None:
    differences = (find_difference(first, other, f"{path}.{key}" if path else key) for key, first, other in pairs)
    return next((difference for difference in differences if difference), None)


def _shorten(value: Plain) -> str:
    text = "not there" if value is ABSENT else repr(value)
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}…"


def _get_cwd() -> str:
    try:
        return os.getcwd()  # noqa: PTH109  # the name is compared
    except FileNotFoundError:
        return "(removed)"


PROCESS_STATE: dict[str, Callable[[], object]] = {
    "os.environ": lambda: dict(os.environ),
    "the current folder": lambda: "; ".join(filter(None, (_get_cwd(), describe_left_folders()))),
    "sys.path": lambda: list(sys.path),
    "the handler of SIGINT": partial(signal.getsignal, signal.SIGINT),
    "the handler of SIGTERM": partial(signal.getsignal, signal.SIGTERM),
    "the handler of SIGALRM": partial(signal.getsignal, signal.SIGALRM),
    "warnings.filters": lambda: list(warnings.filters),
}
"""The global state of the process, which no episode may change."""


def read_process_state() -> dict[str, object]:
    """Return the global state of the process."""
    return {name: read() for name, read in PROCESS_STATE.items()} | read_generator_states()


@contextmanager
def restore_process_state() -> Iterator[None]:
    """Restore the environment variables, the working folder and `sys.path` after the block.

    Without this, a permanent change by the first episode would hide the same change by later ones.
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
