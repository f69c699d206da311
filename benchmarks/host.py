"""Measure the CPU time and memory that gymsdk itself adds per rollout.

    python benchmarks/host.py [--rollouts 20000] [--concurrency 64]

The scripted oracle plays a trivial environment (one question, one reply, one comparison) in a complete run: gymsdk
generates and writes the rows, plays the episodes, writes every rollout to disk and computes the metrics. The difference
to a run of a tenth of the length gives the cost of one more rollout. The exit status is 1 if a limit is exceeded.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

MAX_CPU_MS, MAX_MEMORY_KB = 1.0, 20.0
"""Maximum CPU time in milliseconds and memory in kilobytes per additional rollout."""

ENVIRONMENT = """
from typing import Literal
from gymsdk import Message, Task, Verdict, hookimpl

class Sum(Task):
    answer: int

@hookimpl
def tasks(split: Literal["train"]):
    number = 0
    while True:
        number += 1
        yield Sum.ask(f"What is {number} + 1?", answer=number + 1)

@hookimpl
def verify(task: Sum, transcript):
    return Verdict(reward=float(transcript.reply == str(task.answer)))

@hookimpl
def solve(task: Sum):
    return Message(content=str(task.answer))
"""

PROGRAM = """
import json, resource, sys, time
from gymsdk.cli import main
try:
    main(sys.argv[1:])
except SystemExit as ended:
    assert not ended.code, ended.code
used = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps({"cpu": used.ru_utime + used.ru_stime, "memory": used.ru_maxrss}))
"""


def install(site: Path) -> None:
    """Write the environment as an installed distribution into the folder *site*."""
    about = site / "trivial-1.0.dist-info"
    about.mkdir()
    (site / "trivial.py").write_text(ENVIRONMENT)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: trivial\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[gymsdk.environments]\ntrivial = trivial\n")


def run_rollouts(site: Path, rollouts: int, concurrency: int) -> dict[str, float]:
    """Return the CPU time in seconds and the peak memory in kilobytes of a run."""
    options = ["rollout", "trivial", "--limit", rollouts, "--concurrency", concurrency, "-o", site / f"out-{rollouts}"]
    command = [sys.executable, "-c", PROGRAM, *map(str, options)]
    completed = subprocess.run(command, check=True, capture_output=True, text=True, env={"PYTHONPATH": str(site)})
    found: dict[str, float] = json.loads(completed.stdout.splitlines()[-1])
    return found


def main() -> int:
    """Print the measurements; return 1 if a limit is exceeded."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rollouts", type=int, default=20_000)
    parser.add_argument("--concurrency", type=int, default=64)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder)
        install(site)
        few, many = (
            run_rollouts(site, count, arguments.concurrency) for count in (arguments.rollouts // 10, arguments.rollouts)
        )
    more = arguments.rollouts - arguments.rollouts // 10
    cpu, memory = 1e3 * (many["cpu"] - few["cpu"]) / more, (many["memory"] - few["memory"]) / more
    print(f"CPU per rollout      {cpu:8.3f} ms  (limit {MAX_CPU_MS})")
    print(f"memory per rollout   {memory:8.2f} kB  (limit {MAX_MEMORY_KB})")
    print(f"memory of the run    {many['memory'] / 1024:8.0f} MB")
    return int(cpu > MAX_CPU_MS or memory > MAX_MEMORY_KB)


if __name__ == "__main__":
    sys.exit(main())
