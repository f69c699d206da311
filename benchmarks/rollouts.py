"""How many rollouts a second: the wall time of `gymsdk rollout` with the oracle, start-up and figures included.

usage: rollouts.py [TASKS]

Plays TASKS tasks (by default 1,000) of each environment, one environment at a time. Exits with 1 where a rollout has no
reward, or not the best one.
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
    """Print a line for each environment."""
    tasks = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    print(f"{tasks} tasks each, scripted/oracle, 64 at once")
    right = [measured(environment, tasks) for environment in ENVIRONMENTS]
    if not all(right):
        sys.exit(1)


def measured(environment: str, tasks: int) -> bool:
    """Print how fast *tasks* rollouts are; gives whether each has the best reward."""
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch, "run")
        seconds = spent([environment, "--split", "train", "--limit", str(tasks), "--output", str(output)])
        rollouts = [json.loads(line) for line in (output / "rollouts.jsonl").read_text().splitlines()]
    turns = sum(rollout["gymsdk"]["turns"] for rollout in rollouts)
    rate = len(rollouts) / seconds
    print(f"{environment:<12} {len(rollouts)} rollouts, {turns} turns: {seconds:4.1f} s, {rate:4.0f} rollouts a second")
    return [rollout["reward"] for rollout in rollouts] == [1.0] * tasks


def spent(arguments: list[str]) -> float:
    """Give the seconds of one `gymsdk rollout`."""
    started = time.perf_counter()
    subprocess.run([sys.executable, "-m", "gymsdk", "rollout", *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
