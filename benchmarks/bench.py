"""What `/run` costs: the CPU of the serving process for a rollout of two tool calls, its policy in the same process.

usage: bench.py [--rollouts N] [--concurrency C]

Only tasks are played whose rollout is two tool calls, each in a turn of its own, and a reply: three calls of the model.
The client is another process. Exits with 1 where a limit is exceeded, or a reward is not as it was recorded.
"""

from __future__ import annotations

import argparse
import asyncio
import sys

from gymsdk.bench.load import BenchPlan, measure
from gymsdk.bench.report import BenchResult, LoadResult
from gymsdk.bench.stage import SERVERS
from gymsdk.types import Rollout

LIMIT = 1.5
"""Milliseconds of CPU that a rollout may cost the serving process."""


def two_calls(rollout: Rollout) -> bool:
    """Give whether a rollout is two tool calls, one after the other, and a reply."""
    output = rollout.response["output"] if rollout.response else []
    return rollout.turns == 3 and sum(item.get("type") == "function_call" for item in output) == 2


def main() -> int:
    """Print the figures; 1 where one is too high."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rollouts", type=int, default=2000)
    parser.add_argument("--concurrency", type=int, default=16)
    asked = parser.parse_args()
    bench = BenchPlan(
        environments={"tool_call": {}},
        split="train",
        model="scripted/oracle",
        rollouts=asked.rollouts,
        concurrency_levels=(asked.concurrency,) * 3,
        keep=two_calls,
    )
    return asyncio.run(_judged(bench))


async def _judged(bench: BenchPlan) -> int:
    async for served in measure(bench):
        loads = sorted(served.loads, key=_cost)
        _told(served, loads[0])
        # Whatever else runs here only adds: the least of some loads is what it costs.
        return int(_cost(loads[0]) > LIMIT or not all(load.is_correct for load in loads))
    return 1


def _told(served: BenchResult, load: LoadResult) -> None:
    memory = load.memory[SERVERS]
    print(f"{served.environment}, {load.rollouts} rollouts of two tool calls, {load.concurrency} at once")
    print(f"CPU of the servers a rollout          {_cost(load):8.3f} ms  (limit {LIMIT})")
    print(f"rollouts a second                     {load.rate:8.1f}")
    if load.latency:
        print(f"latency, half of them                 {load.latency.p50:8.1f} ms")
        print(f"latency, 99 of 100                    {load.latency.p99:8.1f} ms")
    print(f"model calls a rollout                 {load.calls:8.2f}")
    print(f"HTTP requests a rollout               {sum(load.requests.values()):8.2f}")
    print(f"memory of the servers before, after   {memory.before:8.1f} {memory.after:.1f} MB")
    print(f"rewards unlike the recording's        {load.wrong!s:>8}")
    for kind, count in load.failures.items():
        print(f"no reward: {kind:<26} {count:8}")


def _cost(load: LoadResult) -> float:
    return load.cpu[SERVERS]


if __name__ == "__main__":
    sys.exit(main())
