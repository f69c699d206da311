"""Measure the CPU and the memory of the processes of a benchmark while a load runs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import TypeAlias

from gymsdk.bench.processes import ProcessUsage, measure_process
from gymsdk.bench.report import Memory
from gymsdk.bench.stage import LOAD, Stage
from gymsdk.errors import GymsdkError

SAMPLE_SECONDS = 0.5
"""Seconds between two measurements of memory."""

Memories: TypeAlias = dict[str, list[float]]
"""The samples of each process, in megabytes."""


def measure_cpu(stage: Stage) -> dict[str, float]:
    """Return the seconds of CPU used so far by each process of *stage*, by its child processes, and by this process."""
    seconds = {LOAD: time.process_time()}
    for name, used in _measure_processes(stage):
        seconds |= {name: used.cpu, name_children(name): used.children_cpu}
    return seconds


def _measure_processes(stage: Stage) -> Iterator[tuple[str, ProcessUsage]]:
    for name, pid in stage.pids.items():
        try:
            yield name, measure_process(pid, stage.memory_measure)
        except ProcessLookupError:
            raise GymsdkError(f"the process of the {name} ended under load; see its log") from None


def name_children(name: str) -> str:
    """Return the label of the processes that the process *name* has started, such as those for grading."""
    return f"{name}' child processes" if name.endswith("s") else f"{name}'s child processes"


@asynccontextmanager
async def sample_memory(stage: Stage) -> AsyncIterator[Memories]:
    """Sample the memory of each process of *stage*, including its child processes."""
    memories: Memories = {name: [] for name in stage.pids}

    def take_samples() -> None:
        for name, used in _measure_processes(stage):
            memories[name].append(used.memory + used.children_memory)

    async def watch() -> None:
        while True:
            await asyncio.sleep(SAMPLE_SECONDS)
            # The system needs milliseconds for the proportional set size of a large process.
            await asyncio.to_thread(take_samples)

    take_samples()
    watching = asyncio.ensure_future(watch())
    try:
        yield memories
    finally:
        watching.cancel()
        await asyncio.wait({watching})
    take_samples()


def summarise_memory(samples: list[float]) -> Memory:
    """Return the first, the middle, the last and the highest of *samples*."""
    before, half, after = (round(samples[index], 1) for index in (0, len(samples) // 2, -1))
    return Memory(before=before, half=half, after=after, most=round(max(samples), 1))
