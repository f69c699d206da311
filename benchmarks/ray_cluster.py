r"""Grade maths answers inline, in local workers, and on a Ray cluster of three nodes on this machine.

usage: ray_cluster.py [--answers N]

The first table grades the same answers in each way: the wall time, and the CPU time of all processes. The second runs
functions without work, one at a time and many at once: the overhead of a call. The three nodes share the cores of this
machine, so that the cluster cannot be faster than local workers here. The exit status is 1 if an answer gets another
grade than inline, or if a call on the cluster costs more than 2 ms among many.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ["RAY_AUTH_MODE"] = "disabled"
sys.path.insert(0, str(Path(__file__).parent))

import grading
from ray.cluster_utils import Cluster

from gym_env_math.library import grade
from gymsdk import offload
from gymsdk.ray import RayExecutor, connect
from gymsdk.workers.offload import Executor, InlineExecutor, use_executor
from gymsdk.workers.processes import ProcessExecutor

MAX_OVERHEAD_MS = 2.0
TICKS = os.sysconf("SC_CLK_TCK")


@offload(timeout=5)
def do_nothing(number: int) -> int:
    """Return *number*: a call that costs only its overhead."""
    return number


def measure_cpu() -> float:
    """Return the CPU seconds of all processes of this machine's user that belong to this benchmark or to Ray."""
    total = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
            command = (path.parent / "cmdline").read_bytes()
        except OSError:
            continue
        if b"ray" in command or b"gymsdk" in command or path.parent.name == str(os.getpid()):
            total += int(fields[11]) + int(fields[12])
    return total / TICKS


@contextmanager
def open_executors() -> Iterator[dict[str, Executor]]:
    """Start a cluster, and yield each executor by its name."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    for _ in range(2):
        cluster.add_node(num_cpus=1)
    local = ProcessExecutor(os.cpu_count() or 1)
    with connect(cluster.address):
        yield {"inline": InlineExecutor(), "local workers": local, "Ray, 3 nodes": RayExecutor()}
    local.close()
    cluster.shutdown()  # type: ignore[no-untyped-call]


def run(executor: Executor, work: Callable[[], Any]) -> tuple[Any, float, float]:
    """Return the result of the coroutine that *work* returns, its wall seconds and its CPU seconds."""

    async def measured() -> Any:
        return await work()

    with use_executor(executor):
        asyncio.run(measured())  # the workers are warm, and have imported the grader
        cpu, began = measure_cpu(), time.perf_counter()
        result = asyncio.run(measured())
        return result, time.perf_counter() - began, measure_cpu() - cpu


def print_grading(executors: dict[str, Executor], answers: Sequence[grading.Pair]) -> bool:
    """Print the first table, and return whether all grades are equal."""

    async def grade_all() -> list[Any]:
        return [str(result) for result in await asyncio.gather(*(grade(pair.gold, pair.text) for pair in answers))]

    print(f"{len(answers)} maths answers       wall      CPU   CPU per answer")
    results = {}
    for name, executor in executors.items():
        results[name], wall, cpu = run(executor, grade_all)
        print(f"{name:<16} {wall:12.2f} s {cpu:6.2f} s {cpu * 1e3 / len(answers):10.2f} ms", flush=True)
    first, *others = results.values()
    return all(grades == first for grades in others)


def print_overhead(executors: dict[str, Executor]) -> bool:
    """Print the second table, and return whether the limit is kept."""

    async def one_at_a_time() -> None:
        for number in range(200):
            await do_nothing(number)

    async def many() -> None:
        await asyncio.gather(*(do_nothing(number) for number in range(5000)))

    print("\nno work           one at a time    5000 at once")
    cost = 0.0
    for name, executor in executors.items():
        _, alone, _ = run(executor, one_at_a_time)
        _, together, _ = run(executor, many)
        cost = together / 5000 * 1e3
        print(f"{name:<16} {alone / 200 * 1e3:11.2f} ms {cost:12.2f} ms", flush=True)
    return cost <= MAX_OVERHEAD_MS


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=1200)
    options = parser.parse_args()
    with open_executors() as executors:
        equal = print_grading(executors, [*grading.answers(options.answers, 1)])
        cheap = print_overhead(executors)
    if not (equal and cheap):
        sys.exit("a grade differs" if not equal else f"a call costs more than {MAX_OVERHEAD_MS:g} ms")


if __name__ == "__main__":
    main()
