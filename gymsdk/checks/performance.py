"""A performance: what one episode gave, action by action, while a script was played; two of them can be compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import from_json, to_json

from gymsdk import wire
from gymsdk.checks.subject import Subject
from gymsdk.environment import Environment
from gymsdk.errors import EpisodeError
from gymsdk.models.scripted import build
from gymsdk.sitting import Budget, Sitting
from gymsdk.transcript import Item
from gymsdk.turns import turns
from gymsdk.types import State, Task, Verdict

GARBAGE = (
    [wire.function_call("no_such_tool", "{}", "call_g0", id="fc_g0")],
    [wire.function_call("no_such_tool", "{not json", "call_g1", id="fc_g1")],
    [wire.message("I would rather not say. 0 1 2 3", id="msg_g2")],
)
"""Turns no policy should take, and some do."""

SHORT = 120
"""Characters of a value that a sentence quotes."""


@dataclass(frozen=True, slots=True)
class Script:
    """The turns to play on a *task*; *name* says whose they are."""

    name: str
    task: Task
    seed: int
    turns: tuple[list[Item], ...]

    @property
    def title(self) -> str:
        """Whose turns on which task, for a sentence."""
        return f"{self.name} on {self.task.input[-1].get('content')!r:.60}"


@dataclass(slots=True)
class Performance:
    """One play of *script*, phase by phase; *seen* is what it has given so far, by phase, as plain JSON."""

    script: Script
    environment: Environment
    budget: Budget
    seen: dict[str, Any] = field(default_factory=dict)
    over: bool = False
    _sitting: Sitting | None = None
    _turn: int = 0

    async def advance(self) -> str:
        """Play the next phase (`reset`, a turn, `verify`, `close`) and give its name."""
        if self._sitting is None:
            self._sitting = Sitting(self.environment, self.budget)
            return await self._phase("reset", self._reset(self._sitting))
        sitting = self._sitting
        if not sitting.over and self._turn < len(self.script.turns):
            self._turn += 1
            return await self._phase(f"turn {self._turn}", self._step(sitting))
        if sitting.ending is None:
            return await self._phase("verify", self._verify(sitting))
        self.over = True
        await sitting.close()
        return "close"

    async def whole(self) -> dict[str, Any]:
        """Play what is left and give what was seen."""
        while not self.over:
            await self.advance()
        return self.seen

    async def _phase(self, name: str, coroutine: Any) -> str:
        try:
            self.seen[name] = await coroutine
        except EpisodeError as error:
            assert self._sitting is not None, "a phase has a sitting"
            self._sitting.ending = error
            self.seen[name] = {"failure": error.kind}
        return name

    async def _reset(self, sitting: Sitting) -> Any:
        episode = await sitting.open(self.script.task, seed=self.script.seed)
        return {
            "opening": plain(episode.transcript.opening),
            "tools": plain(episode.tools),
            "state": state(episode.state),
        }

    async def _step(self, sitting: Sitting) -> Any:
        taken = await sitting.answer(wire.response(list(self.script.turns[self._turn - 1]), model="script"))
        after = state(sitting.episode.state) if sitting.episode else None
        return {"answer": plain(taken.items), "reward": taken.reward, "ended": taken.ended, "state": after}

    async def _verify(self, sitting: Sitting) -> Any:
        await sitting.judge()
        return {"verdict": verdict(sitting.ending)}


async def recorded(subject: Subject, environment: Environment, task: Task, policy: str) -> Script | None:
    """Give the turns the scripted *policy* takes on *task*, `None` where it cannot play it."""
    rollout = await subject.play(environment, build(policy), task)
    if rollout.failure and rollout.failure.stage == "model":
        return None
    output = rollout.response["output"] if rollout.response else []
    return Script(f"scripted/{policy}", task, subject.seed, tuple(turns(output)))


async def scripts(subject: Subject, environment: Environment, *, tasks: int) -> list[Script]:
    """Give the turns of the oracle and the random policy on the first *tasks*, and garbage on one."""
    chosen = spread(subject.tasks, tasks)
    found = [await recorded(subject, environment, task, policy) for task in chosen for policy in ("oracle", "random")]
    garbage = [Script("garbage", task, subject.seed, GARBAGE) for task in chosen[:1]]
    return [script for script in found if script is not None] + garbage


def spread(tasks: Sequence[Task], count: int) -> list[Task]:
    """Give *count* of the tasks, from the first to the last."""
    step = max(1, len(tasks) // count)
    return list(tasks[::step][:count])


def plain(value: Any) -> Any:
    """Give *value* as plain JSON; of what JSON cannot hold, only the type."""
    # By way of text: what is no number must equal itself.
    return from_json(to_json(value, fallback=lambda other: f"<{type(other).__name__}>", inf_nan_mode="strings"))


def state(given: State) -> Any:
    """Give a state as plain JSON."""
    return plain(given.model_dump(mode="python"))


def verdict(given: object) -> Any:
    """Give a verdict as plain JSON."""
    return plain(given.model_dump(mode="python")) if isinstance(given, Verdict) else None


def difference(one: Any, other: Any, where: str = "") -> str | None:
    """Give where *other* first differs from *one* and how, `None` where they are equal."""
    if isinstance(one, dict) and isinstance(other, dict):
        return _first(((key, one.get(key), other.get(key)) for key in [*one, *(other.keys() - one.keys())]), where)
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return _first(((str(n), a, b) for n, (a, b) in enumerate(zip(one, other, strict=True))), where)
    if one == other:
        return None
    return f"{where or 'it'} was {_short(one)}, then {_short(other)}"


def _first(pairs: Any, where: str) -> str | None:
    for key, one, other in pairs:
        if found := difference(one, other, f"{where}.{key}" if where else str(key)):
            return found
    return None


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= SHORT else f"{text[:SHORT]}…"
