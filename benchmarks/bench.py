"""Measure the CPU time of the serving process per `/run` request, for a rollout with two tool calls.

usage: bench.py [--rollouts N] [--concurrency C]

The script uses only tasks whose rollout has two tool calls in separate turns and a reply, which is three model calls.
The policy runs in the serving process and the client in another process. The exit status is 1 if a limit is exceeded or
a reward differs from the recorded reward.
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
"""Maximum CPU time of the serving process per rollout, in milliseconds."""


def has_two_calls(rollout: Rollout) -> bool:
    """Return whether a rollout consists of two tool calls, one after the other, and a reply."""
    output = rollout.response["output"] if rollout.response else []
    return rollout.turns == 3 and sum(item.get("type") == "function_call" for item in output) == 2


def main() -> int:
    """Print the measurements; return 1 if a limit is exceeded."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rollouts", type=int, default=2000)
    parser.add_argument("--concurrency", type=int, default=16)
    arguments = parser.parse_args()
    bench = BenchPlan(
        environments={"tool_call": {}},
        split="train",
        model="scripted/oracle",
        rollouts=arguments.rollouts,
        concurrency_levels=(arguments.concurrency,) * 3,
        keep=has_two_calls,
    )
    return asyncio.run(_run_benchmark(bench))


async def _run_benchmark(bench: BenchPlan) -> int:
    async for result in measure(bench):
        loads = sorted(result.loads, key=_server_cpu)
        _print_report(result, loads[0])
        # Other processes on this machine can only add CPU time, so the lowest measurement is the best estimate.
        return int(_server_cpu(loads[0]) > LIMIT or not all(load.is_correct for load in loads))
    return 1


def _print_report(result: BenchResult, load: LoadResult) -> None:
    memory = load.memory[SERVERS]
    print(f"{result.environment}, {load.rollouts} rollouts of two tool calls, {load.concurrency} concurrent")
    print(f"CPU of the servers per rollout        {_server_cpu(load):8.3f} ms  (limit {LIMIT})")
    print(f"rollouts per second                   {load.rate:8.1f}")
    if load.latency:
        print(f"latency, p50                          {load.latency.p50:8.1f} ms")
        print(f"latency, p99                          {load.latency.p99:8.1f} ms")
    print(f"model calls per rollout               {load.calls:8.2f}")
    print(f"HTTP requests per rollout             {sum(load.requests.values()):8.2f}")
    print(f"{result.memory_measure} of the servers before, after      {memory.before:8.1f} {memory.after:.1f} MB")
    print(f"rewards that differ from the recording{load.wrong!s:>8}")
    for kind, count in load.failures.items():
        print(f"no reward: {kind:<26} {count:8}")


def _server_cpu(load: LoadResult) -> float:
    return load.cpu[SERVERS]


if __name__ == "__main__":
    sys.exit(main())
