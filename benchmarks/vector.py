"""What a vector step costs at 1, 64 and 1,024 environments, against a plain Python loop over single ones.

    python benchmarks/vector.py [--most 1024]

Two environments, stepped both ways in one process, in turn: one whose tool answers at once, for the CPU of one
sub-environment's step, and one whose tool sleeps 5 ms, for the wall clock of all of them. A figure is the best of its
rounds. Exits with 1 where a limit is exceeded.
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
"""Seconds the sleeping tool takes."""

JUDGED, MOST_CPU, MOST_WALL = 64, 1.2, 0.5
"""At so many environments, a step of the vector may take so many times the CPU and the wall clock of the loop's."""

ACTION = [{"type": "function_call", "name": "wait", "arguments": "{}", "call_id": "call"}]

ROUNDS, FEW = 20, 3
"""Resets and steps of each kind, and how many where there are most environments."""

Step = Callable[[], object]


class Waiting:
    """An environment with a tool that takes *seconds*."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    @hookimpl
    def tasks(self, split: Literal["train"]) -> Iterator[Task]:
        """Give a hundred tasks."""
        return (Task.ask(f"{split} {number}") for number in range(100))

    @hookimpl
    def tools(self) -> list[Callable[..., Any]]:
        """Give the tool."""

        async def wait() -> str:
            """Wait a little."""
            if self.seconds:
                await asyncio.sleep(self.seconds)
            return "waited"

        return [wait]

    @hookimpl
    async def verify(self) -> Verdict:
        """Be content."""
        return Verdict(reward=1.0)


class Spent(NamedTuple):
    """Seconds of the wall clock, and of the CPU of all threads."""

    wall: float
    cpu: float


def clocked(work: Step) -> Spent:
    """Give what *work* takes."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return Spent(time.perf_counter() - wall, time.process_time() - cpu)


def best(spent: list[Spent]) -> Spent:
    """Give the least of each."""
    return Spent(min(each.wall for each in spent), min(each.cpu for each in spent))


class Row(NamedTuple):
    """What a call on *size* environments takes, looped over and as one vector."""

    what: str
    size: int
    looped: Spent
    vector: Spent

    def __str__(self) -> str:
        figures = (
            f"{1e6 * each.cpu / self.size:8.0f} us {1e3 * each.wall:9.2f} ms" for each in (self.looped, self.vector)
        )
        return f"{self.what:<14}{self.size:>6} " + "  ".join(figures) + f"{self.cpu:8.2f} {self.wall:8.2f}"

    @property
    def cpu(self) -> float:
        """How many times the loop's CPU the vector takes."""
        return self.vector.cpu / self.looped.cpu

    @property
    def wall(self) -> float:
        """How many times the loop's wall clock the vector takes."""
        return self.vector.wall / self.looped.wall


def measured(what: str, seconds: float, size: int, rounds: int) -> Iterator[Row]:
    """Yield the rows of `make`, of a reset and of a step, the two ways in turn."""
    environment = Environment("waiting", Waiting(seconds))
    singles: list[Env] = []
    looped = clocked(lambda: singles.extend(Env(environment) for _ in range(size)))
    vectors: list[VectorEnv] = []
    yield Row(f"{what} make", size, looped, clocked(lambda: vectors.append(VectorEnv(environment, num_envs=size))))
    vector, actions = vectors[0], [ACTION] * size
    # The first one finds out what tasks there are, each environment for itself.
    resets = [in_turn(lambda: [each.reset() for each in singles], vector.reset) for _ in range(rounds + 1)][1:]
    steps = [
        in_turn(lambda: [each.step(ACTION) for each in singles], lambda: vector.step(actions)) for _ in range(rounds)
    ]
    for name, pairs in (("reset", resets), ("step", steps)):
        yield Row(f"{what} {name}", size, best([one for one, _ in pairs]), best([other for _, other in pairs]))
    vector.close()
    for each in singles:
        each.close()


def in_turn(one: Step, other: Step) -> tuple[Spent, Spent]:
    """Give what the one takes, then what the other takes."""
    return clocked(one), clocked(other)


def main() -> int:
    """Print the table; 1 where a limit is exceeded."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--most", type=int, choices=SIZES[SIZES.index(JUDGED) :], default=max(SIZES))
    asked = parser.parse_args()
    print(" " * 21 + f"{'a loop over Env':>23}  {'VectorEnv':>23}{'times':>8}")
    print(f"{'':<14}{'envs':>6}" + f"{'CPU each':>12}{'wall':>12} " * 2 + f"{'CPU':>7}{'wall':>9}")
    # What is imported on the way is not what one more costs.
    list(measured("import", 0.0, 1, 1))
    rows: list[Row] = []
    for size in (size for size in SIZES if size <= asked.most):
        for what, seconds in (("idle", 0.0), ("sleeping", SLEEP)):
            for row in measured(what, seconds, size, ROUNDS if size < max(SIZES) else FEW):
                print(row, flush=True)
                rows.append(row)
    judged = {row.what: row for row in rows if row.size == JUDGED}
    cpu, wall = judged["idle step"].cpu, judged["sleeping step"].wall
    print(f"at {JUDGED}: CPU of an idle step {cpu:.2f} times the loop's (limit {MOST_CPU})")
    print(f"at {JUDGED}: wall clock of a sleeping step {wall:.2f} times the loop's (limit {MOST_WALL})")
    return int(cpu > MOST_CPU or wall > MOST_WALL)


if __name__ == "__main__":
    sys.exit(main())
