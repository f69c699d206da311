"""Measure rollouts per second: the wall time of `gymsdk rollout` with the oracle, including start-up and metrics.

usage: rollouts.py [TASKS]

The script plays TASKS tasks (default: 1,000) of each environment, one environment at a time. The exit status is 1 if a
rollout does not have the maximum reward.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ENVIRONMENTS = ("math", "multineedle", "tool_call")


def main() -> None:
    """Print one line per environment."""
    tasks = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    print(f"{tasks} tasks each, scripted/oracle, 64 concurrent")
    all_correct = [measure(environment, tasks) for environment in ENVIRONMENTS]
    if not all(all_correct):
        sys.exit(1)


def measure(environment: str, tasks: int) -> bool:
    """Print the rate of *tasks* rollouts; return whether each rollout has the maximum reward."""
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch, "run")
        seconds = time_rollouts([environment, "--split", "train", "--limit", str(tasks), "--output", str(output)])
        rollouts = [json.loads(line) for line in (output / "rollouts.jsonl").read_text().splitlines()]
    turns = sum(rollout["gymsdk"]["turns"] for rollout in rollouts)
    rate = len(rollouts) / seconds
    print(
        f"{environment:<12} {len(rollouts)} rollouts, {turns} turns: {seconds:4.1f} s, {rate:4.0f} rollouts per second"
    )
    return [rollout["reward"] for rollout in rollouts] == [1.0] * tasks


def time_rollouts(arguments: list[str]) -> float:
    """Return the wall time of one `gymsdk rollout` in seconds."""
    started = time.perf_counter()
    subprocess.run([sys.executable, "-m", "gymsdk", "rollout", *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
