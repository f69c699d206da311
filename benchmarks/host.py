"""What the host itself costs: CPU and memory of runs whose episodes are next to nothing.

    python benchmarks/host.py [--rollouts 20000] [--concurrency 64]

A trivial environment (one question, one reply, one comparison) is played by the scripted oracle through a whole run:
rows generated and written, episodes played, every rollout on disk, figures summed up. A run of a tenth of the length
tells what a longer one adds. Exits with 1 where a limit is exceeded.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

MOST_CPU, MOST_MEMORY = 1.0, 20.0
"""Milliseconds of CPU and kilobytes of memory that one more rollout may cost."""

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

PLAYED = """
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
    """Put the environment where Python finds it."""
    about = site / "trivial-1.0.dist-info"
    about.mkdir()
    (site / "trivial.py").write_text(ENVIRONMENT)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: trivial\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[gymsdk.environments]\ntrivial = trivial\n")


def played(site: Path, rollouts: int, concurrency: int) -> dict[str, float]:
    """Give the CPU in seconds and the peak memory in kilobytes of a run."""
    words = ["rollout", "trivial", "--limit", rollouts, "--concurrency", concurrency, "-o", site / f"out-{rollouts}"]
    command = [sys.executable, "-c", PLAYED, *map(str, words)]
    ended = subprocess.run(command, check=True, capture_output=True, text=True, env={"PYTHONPATH": str(site)})
    found: dict[str, float] = json.loads(ended.stdout.splitlines()[-1])
    return found


def main() -> int:
    """Print the figures; 1 where one is too high."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rollouts", type=int, default=20_000)
    parser.add_argument("--concurrency", type=int, default=64)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder)
        install(site)
        few, many = (played(site, count, asked.concurrency) for count in (asked.rollouts // 10, asked.rollouts))
    more = asked.rollouts - asked.rollouts // 10
    cpu, memory = 1e3 * (many["cpu"] - few["cpu"]) / more, (many["memory"] - few["memory"]) / more
    print(f"CPU per rollout      {cpu:8.3f} ms  (limit {MOST_CPU})")
    print(f"memory per rollout   {memory:8.2f} kB  (limit {MOST_MEMORY})")
    print(f"memory of the run    {many['memory'] / 1024:8.0f} MB")
    return int(cpu > MOST_CPU or memory > MOST_MEMORY)


if __name__ == "__main__":
    sys.exit(main())
