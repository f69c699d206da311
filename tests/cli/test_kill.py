"""A run that is killed at any point can be resumed and ends like an uninterrupted run."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from cli.conftest import Command, Start

TASKS, REPEATS, KILLS = 80, 6, 20

ARGUMENTS = (
    "rollout",
    "sums",
    "--model",
    "scripted/oracle:0.7",
    "--limit",
    TASKS,
    "-k",
    REPEATS,
    "--concurrency",
    4,
    "--set",
    "pause=0.02",
)

KILLED_AT = """
import os, signal, sys
folder, left = sys.argv.pop(1), int(sys.argv.pop(1))

def count(event, arguments):
    global left
    touches = event in {"os.rename", "os.remove", "os.mkdir", "os.rmdir"} or event == "open" and arguments[2] & 3
    if touches and folder in str(arguments[0]):
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(count)
from gymsdk.cli import main
main()
"""
"""A program that runs the command line and is killed before it changes a folder for the given time."""


def _read_comparable(out: Path) -> dict[tuple[int, int], Any]:
    """Return the rollouts of a folder by task and repeat, without ids and times; a duplicate is an error."""
    rollouts: dict[tuple[int, int], Any] = {}
    for line in map(json.loads, (out / "rollouts.jsonl").read_bytes().splitlines()):
        key = line["_ng_task_index"], line["_ng_rollout_index"]
        assert key not in rollouts
        del line["gymsdk"]["timing"]
        line["response"] = [item["content"] for item in line["response"]["output"]]
        rollouts[key] = line
    return rollouts


def _metrics(out: Path) -> Any:
    (summary,) = json.loads((out / "metrics.json").read_bytes())
    return summary["agent_metrics"]


def _wait_for_lines(process: subprocess.Popen[str], path: Path, by: int) -> None:
    """Wait until a file has *by* more lines, or its writer has ended."""
    lines = path.read_bytes().count(b"\n") if path.exists() else 0
    while process.poll() is None:
        if path.exists() and path.read_bytes().count(b"\n") >= lines + by:
            return
        time.sleep(0.001)


def _tear(path: Path, rng: random.Random) -> None:
    """Cut the last line, as a machine that goes down together with its process may do."""
    if path.exists() and (size := path.stat().st_size):
        with path.open("rb+") as file:
            file.truncate(max(0, size - rng.randrange(80)))


def test_twenty_kills_neither_repeat_nor_drop_a_rollout(start: Start, gymsdk: Command, workdir: Path) -> None:
    rng = random.Random(20)
    path = workdir / "out" / "rollouts.jsonl"
    for number in range(KILLS):
        process = start(*ARGUMENTS, "-o", "out", "--resume")
        if number % 4 == 0:
            time.sleep(rng.uniform(0.0, 0.5))
        else:
            _wait_for_lines(process, path, rng.randrange(1, 14))
        process.send_signal(signal.SIGKILL)
        assert process.wait(timeout=30) == -signal.SIGKILL
        if number % 3 == 0:
            _tear(path, rng)

    assert gymsdk(*ARGUMENTS, "-o", "out", "--resume").code == 0
    assert gymsdk(*ARGUMENTS, "-o", "whole").code == 0
    assert _read_comparable(workdir / "out").keys() == {
        (task, repeat) for task in range(TASKS) for repeat in range(REPEATS)
    }
    assert _read_comparable(workdir / "out") == _read_comparable(workdir / "whole")
    own, whole = _metrics(workdir / "out"), _metrics(workdir / "whole")
    assert {key: pytest.approx(value) for key, value in whole.items()} == own


def test_a_run_killed_at_any_change_of_the_folder_can_be_resumed(start: Start, gymsdk: Command, workdir: Path) -> None:
    old = ("rollout", "sums", "--limit", 3, "-o", "out")
    new = ("rollout", "sums", "--limit", 4, "-o", "out")
    changes = 0
    while True:
        gymsdk(*old, "--overwrite")
        command = [sys.executable, "-c", KILLED_AT, str(Path("out")), str(changes), *map(str, new), "--overwrite"]
        killed = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        if killed.returncode == 0:
            break
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        result = gymsdk(*new, "--resume")
        if result.code == 0:
            assert len(_read_comparable(workdir / "out")) == 4
        else:
            # The process was killed before it changed the old run, so the old run is complete.
            assert "--limit was 3, now 4" in result.err
            assert len(_read_comparable(workdir / "out")) == 3
            assert gymsdk(*old, "--resume").code == 0
        changes += 1
    assert changes >= 15
