"""Check that memory, files, threads and tasks of `gymsdk serve` and `gymsdk rollout` do not grow under a long load.

usage: soak.py [--minutes M] [--in-flight N]

Both play tool_call with the stub model server at the same time, each with N requests in flight, so that each saturates
a core. The first fifth of the time is the warm-up. Then the script compares the median of the second fifth with the
median of the last one. The limits of the growth:

- memory of the servers: 16 MiB. In 20 minutes, at least 100,000 rollouts are played between the two medians, so
  that a leak of 170 bytes per rollout exceeds the limit. The allocator's memory also varies without
  a leak.
- memory of `gymsdk rollout`: 2 kB per finished rollout, because the command keeps the reward and the metrics of each
  rollout until its end.
- files and threads: 8. The number of open connections is constant, but a few may be reconnecting.
- tasks: the number of requests in flight, because a request has one to three tasks while it is played. A task that
  stays behind after each rollout would add thousands.

The exit status is 1 if a limit is exceeded or a request fails.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from yardstick.client import post_rows
from yardstick.figures import Figure, format_table
from yardstick.processes import (
    ProcessTree,
    build_model_options,
    build_watched_command,
    get_agent_url,
    prepare_process,
    run_gymsdk_serve,
    run_stub,
    stop_process,
)
from yardstick.rows import Row, build_rows

ENVIRONMENT = "tool_call"
ROWS = 4096
REPEATS_PER_MINUTE = 20
"""Repeats of each row in `gymsdk rollout`: 1,365 rollouts per second, more than it can play until it is stopped."""

SAMPLES = 100
PARTS = 5
ROLLOUT_STOP_SECONDS = 120
MIB = 2**20
MAX_SERVER_GROWTH_MIB = 16
MAX_ROLLOUT_BYTES = 2048
MAX_COUNT_GROWTH = 8


@dataclass(frozen=True)
class Sample:
    """The resources of a process at one moment, and the number of its played rollouts."""

    memory: int
    files: int
    threads: int
    tasks: int
    rollouts: int


class Subject:
    """A watched process tree with the file of its played rollouts."""

    def __init__(self, name: str, tree: ProcessTree, report: Path) -> None:
        self.name, self.tree, self.report = name, tree, report
        self.samples: list[Sample] = []

    def take_sample(self, rollouts: int) -> None:
        """Record the current resources of the processes."""
        tasks = json.loads(self.report.read_text())["tasks"]
        tree = self.tree
        self.samples.append(Sample(tree.read_memory(), tree.count_files(), tree.count_threads(), tasks, rollouts))

    def get_medians(self, attribute: str) -> tuple[float, float]:
        """Return the median of the second fifth and of the last fifth of the samples."""
        values, size = [getattr(sample, attribute) for sample in self.samples], len(self.samples) // PARTS
        return statistics.median(values[size : 2 * size]), statistics.median(values[-size:])


def yield_until(end: float, rows: Sequence[Row], played: list[int]) -> Iterator[Row]:
    """Yield *rows* again and again until the monotonic time *end*, and count them in *played*."""
    for row in itertools.cycle(rows):
        if time.monotonic() > end:
            return
        played[0] += 1
        yield row


@contextmanager
def run_rollout_command(folder: Path, base_url: str, in_flight: int, repeats: int) -> Iterator[Subject]:
    """Run `gymsdk rollout` from its first rollout until the context ends, in the subfolder `run` of *folder*."""
    tasks, report, rollouts = folder / "rows.jsonl", folder / "rollout.json", folder / "run" / "rollouts.jsonl"
    tasks.write_bytes(b"\n".join(row.body for row in build_rows(ENVIRONMENT, ROWS)) + b"\n")
    load = ["--tasks", str(tasks), "--repeats", str(repeats), "--concurrency", str(in_flight)]
    options = [*load, "--output", str(folder / "run"), *build_model_options(base_url)]
    command = build_watched_command(report, "rollout", ENVIRONMENT, *options)
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            while not (report.exists() and count_lines(rollouts)[0]):
                if process.poll() is not None:
                    raise subprocess.CalledProcessError(process.returncode, command)
                time.sleep(0.1)
            yield Subject("rollout", ProcessTree(process.pid), report)
        finally:
            stop_process(process, ROLLOUT_STOP_SECONDS)


def count_lines(file: Path, start: int = 0) -> tuple[int, int]:
    """Return the number of lines of a file from the byte *start* on, and the number of bytes up to the last of them."""
    if not file.exists():
        return 0, start
    with file.open("rb") as opened:
        opened.seek(start)
        content = opened.read()
    return content.count(b"\n"), start + content.rfind(b"\n") + 1


def soak(seconds: float, in_flight: int) -> list[Figure]:
    """Play for some *seconds* and return the figures."""
    rows, played = build_rows(ENVIRONMENT, ROWS), [0]
    repeats = math.ceil(REPEATS_PER_MINUTE * seconds / 60)
    with tempfile.TemporaryDirectory() as name, run_stub() as stub, ThreadPoolExecutor(1) as executor:
        folder, report = Path(name), Path(name, "serve.json")
        with (
            run_gymsdk_serve(ENVIRONMENT, f"{stub}/v1", report=report) as server,
            run_rollout_command(folder, f"{stub}/v1", in_flight, repeats) as command,
        ):
            served = Subject("serve", server.tree, report)
            end = time.monotonic() + seconds
            load = executor.submit(
                post_rows, get_agent_url(server, ENVIRONMENT), yield_until(end, rows, played), in_flight
            )
            finished = at = 0
            while not load.done() and time.monotonic() < end:
                time.sleep(seconds / SAMPLES)
                lines, at = count_lines(folder / "run" / "rollouts.jsonl", at)
                finished += lines
                served.take_sample(played[0])
                command.take_sample(finished)
            outcome = load.result()
        failures, _ = count_lines(folder / "run" / "failures.jsonl")
    return [
        *compare(served, in_flight),
        Figure("serve", "wrong rewards and failures", outcome.wrong + outcome.failed.total(), limit=0),
        *compare(command, in_flight),
        Figure("rollout", "failures", failures, limit=0),
    ]


def compare(subject: Subject, in_flight: int) -> Iterator[Figure]:
    """Yield the growth between the second and the last fifth of the time."""
    begin, end = subject.get_medians("rollouts")
    yield Figure(subject.name, "rollouts between the medians", end - begin)
    first, last = subject.get_medians("memory")
    yield Figure(subject.name, "memory at the end", last / MIB, "MiB")
    if subject.name == "serve":
        yield Figure(subject.name, "growth of the memory", (last - first) / MIB, "MiB", limit=MAX_SERVER_GROWTH_MIB)
    else:
        growth = (last - first) / max(1, end - begin)
        yield Figure(subject.name, "growth of the memory per rollout", growth, "bytes", limit=MAX_ROLLOUT_BYTES)
    for attribute, limit in (("files", MAX_COUNT_GROWTH), ("threads", MAX_COUNT_GROWTH), ("tasks", in_flight)):
        first, last = subject.get_medians(attribute)
        yield Figure(subject.name, f"{attribute} at the end", last)
        yield Figure(subject.name, f"growth of the {attribute}", last - first, limit=limit)


def main() -> int:
    """Print the figures; return 1 if a limit is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--in-flight", type=int, default=256)
    arguments = parser.parse_args()
    prepare_process()
    figures = soak(60 * arguments.minutes, arguments.in_flight)
    print(f"{arguments.minutes:g} minutes, {arguments.in_flight} in flight each, {os.cpu_count()} cores")
    print(format_table(figures))
    return int(not all(figure.is_within_limit for figure in figures))


if __name__ == "__main__":
    sys.exit(main())
