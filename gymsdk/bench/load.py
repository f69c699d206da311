"""A load: rollouts asked of running servers in a closed loop, and what each process and server did meanwhile."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import count, cycle, islice
from typing import TypeAlias
from uuid import uuid4

from gymsdk.bench import meters, processes
from gymsdk.bench.figures import Load, Memory, latency, mean
from gymsdk.bench.meters import Reading
from gymsdk.bench.processes import Used
from gymsdk.bench.recording import Recording
from gymsdk.bench.stage import LOAD, Stage
from gymsdk.errors import GymsdkError
from gymsdk.rollouts.collect import collect
from gymsdk.rollouts.delivery import Delivery
from gymsdk.rollouts.jobs import Job
from gymsdk.rollouts.tries import Played

EVERY = 0.5
"""Seconds between two looks at the memory of the processes."""

CLOSE = 1e-9
"""How far two rewards may differ and be the same."""

Memories: TypeAlias = dict[str, list[float]]


@dataclass(frozen=True, slots=True)
class Order:
    """What is asked of the servers: *rollouts*, or as many as end within *seconds*, *at_once* in flight."""

    at_once: int
    rollouts: int | None = None
    seconds: float | None = None
    attempts: int = 1


@dataclass(slots=True)
class Tally:
    """What has come of the rollouts so far."""

    expected: Mapping[int, float] | None
    took: array[float] = field(default_factory=lambda: array("d"))
    rewards: array[float] = field(default_factory=lambda: array("d"))
    right: array[float] = field(default_factory=lambda: array("d"))
    wrong: int = 0
    calls: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    messages: dict[str, str] = field(default_factory=dict)

    def add(self, played: Played) -> None:
        """Count one rollout."""
        rollout = played.rollout
        self.calls += rollout.turns
        if rollout.failure is not None or rollout.reward is None:
            kind = rollout.failure.kind if rollout.failure else "no_reward"
            self.failures[kind] += 1
            self.messages.setdefault(kind, rollout.failure.message if rollout.failure else "")
            return
        self.rewards.append(rollout.reward)
        if self.expected is not None:
            right = self.expected[played.job.task]
            self.right.append(right)
            self.wrong += abs(rollout.reward - right) > CLOSE

    @property
    def rollouts(self) -> int:
        """How many there were, those that failed too."""
        return len(self.rewards) + self.failures.total()


async def loaded(stage: Stage, recording: Recording, order: Order) -> Load:
    """Ask the servers of *stage* for rollouts of what is recorded, and give what came of it."""
    tally = Tally(None if recording.rewards is None else _by_task(recording))
    carried = stage.served.client.build_headers_for
    requests, cpu = await meters.reading(stage.metered, carried), _cpu(stage)
    began = time.perf_counter()
    async with _watched(stage) as memories:
        await _played(stage, recording, order, tally)
    seconds = time.perf_counter() - began
    spent = {name: each - cpu[name] for name, each in _cpu(stage).items()}
    after = await meters.reading(stage.metered, carried)
    return _figures(recording, order, tally, seconds, spent, memories, (requests, after))


def _by_task(recording: Recording) -> dict[int, float]:
    return {job.task: reward for job, reward in zip(recording.jobs, recording.rewards or (), strict=True)}


async def _played(stage: Stage, recording: Recording, order: Order, tally: Tally) -> None:
    # A rollout's id is its own: under one that has been, a server would give the answer that it has.
    delivery = Delivery(stage.served.client, attempts=order.attempts, once=stage.served.plays_once)
    run, numbers = uuid4().hex[:12], count()

    async def play(job: Job) -> Played:
        began = time.perf_counter()
        played = await replace(delivery, name=f"bench.{run}.{next(numbers)}")(job)
        tally.took.append(time.perf_counter() - began)
        return played

    async with aclosing(collect(_jobs(recording, order), play, at_once=order.at_once)) as ends:
        async for played in ends:
            tally.add(played)


def _jobs(recording: Recording, order: Order) -> Iterator[Job]:
    until = time.monotonic() + (float("inf") if order.seconds is None else order.seconds)
    for job in islice(cycle(recording.jobs), order.rollouts):
        if time.monotonic() >= until:
            return
        yield job


def _cpu(stage: Stage) -> dict[str, float]:
    """Give the seconds of CPU used so far: by each process of *stage*, by its workers, and by this one."""
    found = {LOAD: time.process_time()}
    for name, used in _used(stage):
        found |= {name: used.cpu, workers_of(name): used.workers_cpu}
    return found


def _used(stage: Stage) -> Iterator[tuple[str, Used]]:
    for name, pid in stage.pids.items():
        try:
            yield name, processes.used(pid)
        except ProcessLookupError:
            raise GymsdkError(f"the process of the {name} ended while it was asked; its log may say why") from None


def workers_of(name: str) -> str:
    """Give what the processes beneath the one called *name* are called."""
    return f"{name}' workers" if name.endswith("s") else f"{name}'s workers"


@asynccontextmanager
async def _watched(stage: Stage) -> AsyncIterator[Memories]:
    """Give the memory of each process of *stage*, workers included, looked at from time to time."""
    found: Memories = {name: [] for name in stage.pids}

    def look() -> None:
        for name, used in _used(stage):
            found[name].append(used.memory + used.workers_memory)

    async def watch() -> None:
        while True:
            await asyncio.sleep(EVERY)
            look()

    look()
    watching = asyncio.ensure_future(watch())
    try:
        yield found
    finally:
        watching.cancel()
        await asyncio.wait({watching})
    look()


def _figures(
    recording: Recording,
    order: Order,
    tally: Tally,
    seconds: float,
    spent: Mapping[str, float],
    memories: Memories,
    readings: tuple[Reading, Reading],
) -> Load:
    each = max(1, tally.rollouts)
    asked = meters.between(*readings)
    others = {workers_of(name) for name in memories}
    return Load(
        environment=recording.environment,
        at_once=order.at_once,
        rollouts=tally.rollouts,
        seconds=round(seconds, 3),
        rate=round(tally.rollouts / seconds, 2),
        latency=latency(tally.took),
        cpu={name: round(1e3 * used / each, 4) for name, used in spent.items() if used or name not in others},
        memory={name: _memory(found) for name, found in memories.items()},
        calls=round(tally.calls / each, 4),
        requests={name: round(number / each, 4) for name, number in asked.items()},
        reward=mean(tally.rewards),
        expected=None if tally.expected is None else mean(tally.right),
        wrong=None if tally.expected is None else tally.wrong,
        failures=dict(tally.failures),
        messages=tally.messages,
        open=readings[1].open,
    )


def _memory(found: list[float]) -> Memory:
    before, half, after = (round(found[index], 1) for index in (0, len(found) // 2, -1))
    return Memory(before=before, half=half, after=after, most=round(max(found), 1))
