"""Compare one `VectorEnv` step with a Python loop over single environments, for 1, 64 and 1,024 environments.

    python benchmarks/vector.py [--most 1024]

The script steps two environments in one process, and alternates between the vector and the loop. The tool of the first
environment returns immediately, which gives the CPU time per sub-environment. The tool of the second sleeps 5 ms, which
gives the wall time of the whole step. Each measurement is the lowest of its rounds. The exit status is 1 if a limit is
exceeded.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

from gymsdk import Environment, Task, Verdict, hookimpl
from gymsdk.gym.env import Env
from gymsdk.gym.vector import VectorEnv

SIZES = (1, 64, 1024)

SLEEP = 0.005
"""Seconds that the slow tool sleeps."""

JUDGED_SIZE, MAX_CPU_RATIO, MAX_WALL_RATIO = 64, 1.2, 0.5
"""The number of environments to judge, and the maximum ratio of the vector to the loop in CPU time and wall time."""

ACTION = [{"type": "function_call", "name": "wait", "arguments": "{}", "call_id": "call"}]

ROUNDS, FEW_ROUNDS = 20, 3
"""Number of resets and of steps, and the smaller number for the largest vector."""

Step = Callable[[], object]


class SleepingTool:
    """An environment with a tool that sleeps *seconds*."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    @hookimpl
    def tasks(self, split: Literal["train"]) -> Iterator[Task]:
        """Return a hundred tasks."""
        return (Task.ask(f"{split} {number}") for number in range(100))

    @hookimpl
    def tools(self) -> list[Callable[..., Any]]:
        """Return the tool."""

        async def wait() -> str:
            """Sleep for the configured time."""
            if self.seconds:
                await asyncio.sleep(self.seconds)
            return "waited"

        return [wait]

    @hookimpl
    async def verify(self) -> Verdict:
        """Return the full reward."""
        return Verdict(reward=1.0)


class Times(NamedTuple):
    """Wall time, and CPU time of all threads, in seconds."""

    wall: float
    cpu: float


def measure_call(work: Step) -> Times:
    """Measure *work*."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return Times(time.perf_counter() - wall, time.process_time() - cpu)


def lowest(times: list[Times]) -> Times:
    """Return the lowest wall time and the lowest CPU time."""
    return Times(min(measured.wall for measured in times), min(measured.cpu for measured in times))


class Row(NamedTuple):
    """The time of one operation on *size* environments, with the loop and with the vector."""

    label: str
    size: int
    looped: Times
    vector: Times

    def __str__(self) -> str:
        figures = (
            f"{1e6 * times.cpu / self.size:8.0f} us {1e3 * times.wall:9.2f} ms" for times in (self.looped, self.vector)
        )
        return f"{self.label:<14}{self.size:>6} " + "  ".join(figures) + f"{self.cpu:8.2f} {self.wall:8.2f}"

    @property
    def cpu(self) -> float:
        """The ratio of the vector's CPU time to that of the loop."""
        return self.vector.cpu / self.looped.cpu

    @property
    def wall(self) -> float:
        """The ratio of the vector's wall time to that of the loop."""
        return self.vector.wall / self.looped.wall


def measure(label: str, seconds: float, size: int, rounds: int) -> Iterator[Row]:
    """Yield a row each for creation, reset and step; alternate between the loop and the vector."""
    environment = Environment("waiting", SleepingTool(seconds))
    singles: list[Env] = []
    looped = measure_call(lambda: singles.extend(Env(environment) for _ in range(size)))
    vectors: list[VectorEnv] = []
    yield Row(
        f"{label} make", size, looped, measure_call(lambda: vectors.append(VectorEnv(environment, num_envs=size)))
    )
    vector, actions = vectors[0], [ACTION] * size
    # Drop the first reset, in which each environment loads its task list.
    resets = [measure_in_turn(lambda: [env.reset() for env in singles], vector.reset) for _ in range(rounds + 1)][1:]
    steps = [
        measure_in_turn(lambda: [env.step(ACTION) for env in singles], lambda: vector.step(actions))
        for _ in range(rounds)
    ]
    for name, pairs in (("reset", resets), ("step", steps)):
        yield Row(
            f"{label} {name}", size, lowest([looped for looped, _ in pairs]), lowest([vector for _, vector in pairs])
        )
    vector.close()
    for single in singles:
        single.close()


def measure_in_turn(looped: Step, vector: Step) -> tuple[Times, Times]:
    """Measure *looped*, then *vector*."""
    return measure_call(looped), measure_call(vector)


def main() -> int:
    """Print the table; return 1 if a limit is exceeded."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--most", type=int, choices=SIZES[SIZES.index(JUDGED_SIZE) :], default=max(SIZES))
    arguments = parser.parse_args()
    print(" " * 21 + f"{'a loop over Env':>23}  {'VectorEnv':>23}{'ratio':>8}")
    print(f"{'':<14}{'envs':>6}" + f"{'CPU each':>12}{'wall':>12} " * 2 + f"{'CPU':>7}{'wall':>9}")
    # Import all modules first, so that the measurements do not include import time.
    list(measure("import", 0.0, 1, 1))
    rows: list[Row] = []
    for size in (size for size in SIZES if size <= arguments.most):
        for label, seconds in (("idle", 0.0), ("sleeping", SLEEP)):
            for row in measure(label, seconds, size, ROUNDS if size < max(SIZES) else FEW_ROUNDS):
                print(row, flush=True)
                rows.append(row)
    judged = {row.label: row for row in rows if row.size == JUDGED_SIZE}
    cpu, wall = judged["idle step"].cpu, judged["sleeping step"].wall
    print(f"at {JUDGED_SIZE}: CPU of an idle step {cpu:.2f} times that of the loop (limit {MAX_CPU_RATIO})")
    print(f"at {JUDGED_SIZE}: wall time of a sleeping step {wall:.2f} times that of the loop (limit {MAX_WALL_RATIO})")
    return int(cpu > MAX_CPU_RATIO or wall > MAX_WALL_RATIO)


if __name__ == "__main__":
    sys.exit(main())
