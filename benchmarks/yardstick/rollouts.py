"""Run `gymsdk rollout` in a process of its own, and read what it used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .processes import build_environ, build_model_options, build_watched_command

ENVIRONMENT = "tool_call"


@dataclass(frozen=True)
class RolloutRun:
    """What a run of `gymsdk rollout` used and wrote.

    Attributes:
        cpu: The CPU time of the process and its children in seconds.
        memory: The peak of its resident memory in bytes.
        longest_stall: The longest stall of its event loop in seconds.
        stalled_at: The time from the start of the event loop to the end of this stall in seconds.
        stalls: The number of stalls over 100 ms.
        tasks: The number of tasks of the event loop in the last second.
        outcomes: The number of rollouts by outcome.
    """

    cpu: float
    memory: int
    longest_stall: float
    stalled_at: float
    stalls: int
    tasks: int
    outcomes: Counter[str]


def run_rollouts(
    base_url: str, in_flight: int, rollouts: int, *, checkout: str = "", on_start: Callable[[int], None] | None = None
) -> RolloutRun:
    """Play *rollouts* tool_call rollouts, *in_flight* at a time, with the model server at *base_url*.

    The rows are those that the environment generates, in a file: if the run generated them, it would start rollouts
    more slowly than they end, and fewer would be in flight. Each row offers all 14 tools.

    Args:
        base_url: The base URL of the stub.
        in_flight: The number of concurrent rollouts.
        rollouts: The number of rollouts.
        checkout: The source tree to import gymsdk from. Default: the installed one.
        on_start: A function to call with the process id once the process has started.

    Raises:
        subprocess.CalledProcessError: The command failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        output, report = Path(folder, "run"), Path(folder, "report.json")
        environ = {**os.environ, **build_environ(checkout)}
        rows = Path(folder, "rows.jsonl")
        generate = ["tasks", ENVIRONMENT, "--split", "train", "--limit", str(rollouts), "--output", str(rows)]
        subprocess.run([sys.executable, "-m", "gymsdk", *generate], env=environ, stdout=subprocess.DEVNULL, check=True)
        options = ["--tasks", str(rows), "--concurrency", str(in_flight), "--output", str(output)]
        command = build_watched_command(report, "rollout", ENVIRONMENT, *options, *build_model_options(base_url))
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environ) as process:
            if on_start:
                on_start(process.pid)
            if process.wait():
                raise subprocess.CalledProcessError(process.returncode, command)
        outcomes = _count_outcomes(output)
        return RolloutRun(**json.loads(report.read_text()), outcomes=outcomes)


def _count_outcomes(run: Path) -> Counter[str]:
    """Return the number of lines of each file of rollouts in a run folder, by the outcome that the file is for."""
    files = {"scored": run / "rollouts.jsonl", "failed": run / "failures.jsonl"}
    return Counter({name: file.read_bytes().count(b"\n") for name, file in files.items() if file.exists()})
