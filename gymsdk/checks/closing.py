"""Check that every episode is closed exactly once and without an error, however it ends."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

from gymsdk.checks.performance import GARBAGE_TURNS, sample_tasks
from gymsdk.checks.report import Check, Finding
from gymsdk.checks.subject import Subject
from gymsdk.environment import Environment
from gymsdk.episode import Budget, play
from gymsdk.errors import EpisodeError
from gymsdk.models.scripted import ScriptedModel, build, play_null
from gymsdk.types import Action, Episode, Item, Row, Step, Task, Verdict

MAX_TASKS = 2
"""How many tasks have their episodes ended in every way."""

SHORT_DEADLINE_SECONDS = 0.05
"""Seconds after which an episode is cancelled, or its deadline expires."""


class _CountingEnvironment:
    """An environment that counts how often its episodes are opened and closed."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self.name = environment.name
        self.opened: list[Episode] = []
        self.closed: Counter[int] = Counter()
        self.complaints: list[str] = []

    async def reset(
        self, row: Row | Task, *, seed: int = 0, id: str = "", repeat: int = 0, deadline: float | None = None
    ) -> Episode:
        """Open an episode and record it."""
        episode = await self._environment.reset(row, seed=seed, id=id, repeat=repeat, deadline=deadline)
        self.opened.append(episode)
        return episode

    async def step(self, episode: Episode, action: Action) -> Step:
        """Answer one action."""
        return await self._environment.step(episode, action)

    async def verify(self, episode: Episode) -> Verdict:
        """Judge the episode."""
        return await self._environment.verify(episode)

    async def solve(self, episode: Episode) -> list[Action] | None:
        """Return the next action of a perfect policy."""
        return await self._environment.solve(episode)

    async def close(self, episode: Episode) -> None:
        """Close the episode and record an error."""
        self.closed[id(episode)] += 1
        try:
            await self._environment.close(episode)
        except EpisodeError as error:
            self.complaints.append(str(error))


Ending = Callable[[_CountingEnvironment, Task, Budget], Awaitable[object]]


async def _play_oracle(watched: _CountingEnvironment, task: Task, budget: Budget) -> object:
    return await play(watched, build("oracle"), task, budget=budget)


async def _play_nothing(watched: _CountingEnvironment, task: Task, budget: Budget) -> object:
    return await play(watched, ScriptedModel("null", play_null), task, budget=budget)


async def _exhaust_turns(watched: _CountingEnvironment, task: Task, budget: Budget) -> object:
    return await play(watched, build("random"), task, budget=budget.model_copy(update={"turns": 1}))


async def _play_garbage(watched: _CountingEnvironment, task: Task, budget: Budget) -> object:
    async def choose(_request: Item, episode: Episode | None) -> list[Item]:
        calls = sum(item.get("type") == "function_call" for item in episode.transcript.items) if episode else 0
        return GARBAGE_TURNS[min(calls, len(GARBAGE_TURNS) - 1)]

    return await play(watched, ScriptedModel("garbage", choose), task, budget=budget)


async def _wait_forever(_request: Item, _episode: Episode | None) -> list[Item]:
    await asyncio.Event().wait()
    return []


async def _cancel_episode(watched: _CountingEnvironment, task: Task, budget: Budget) -> object:
    playing = asyncio.ensure_future(play(watched, ScriptedModel("never", _wait_forever), task, budget=budget))
    await asyncio.wait({playing}, timeout=SHORT_DEADLINE_SECONDS)
    playing.cancel()
    return await asyncio.gather(playing, return_exceptions=True)


async def _exhaust_deadline(watched: _CountingEnvironment, task: Task, budget: Budget) -> object:
    hasty = budget.model_copy(update={"seconds": SHORT_DEADLINE_SECONDS})
    return await play(watched, ScriptedModel("never", _wait_forever), task, budget=hasty)


ENDINGS: dict[str, Ending] = {
    "played by the oracle": _play_oracle,
    "answered with nothing": _play_nothing,
    "out of turns": _exhaust_turns,
    "played with garbage": _play_garbage,
    "cancelled": _cancel_episode,
    "out of time": _exhaust_deadline,
}


async def _check_closing(subject: Subject) -> list[Finding]:
    findings = []
    async with subject.enter_environment() as environment:
        tasks = await subject.count_affordable(environment, MAX_TASKS, each=len(ENDINGS))
        for task in sample_tasks(subject.tasks, tasks):
            for description, ending in ENDINGS.items():
                watched = _CountingEnvironment(environment)
                await ending(watched, task, subject.budget)
                findings += [
                    Finding(seen=f"an episode {description}: {problem}") for problem in _list_miscounts(watched)
                ]
    return list({finding.seen: finding for finding in findings}.values())


def _list_miscounts(watched: _CountingEnvironment) -> list[str]:
    counts = [watched.closed[id(episode)] for episode in watched.opened]
    return [f"it was closed {count} times" for count in counts if count != 1] + watched.complaints


CHECKS = (
    Check(
        id="runtime.close_once",
        asks="every episode is closed exactly once and without an error, however it ends",
        why="what `close` does not release is lost to every later episode, and an error in it goes unnoticed",
        mend="let `close` always release what `reset` acquired, and let it raise nothing",
        run=_check_closing,
    ),
)
