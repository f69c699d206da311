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

WORDS = (
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
"""The command line, killed just before it changes something in a folder for the given time."""


def _told(out: Path) -> dict[tuple[int, int], Any]:
    """What the rollouts of a folder say, but for ids and times; a place told twice is an error."""
    found: dict[tuple[int, int], Any] = {}
    for line in map(json.loads, (out / "rollouts.jsonl").read_bytes().splitlines()):
        key = line["_ng_task_index"], line["_ng_rollout_index"]
        assert key not in found
        del line["gymsdk"]["timing"]
        line["response"] = [item["content"] for item in line["response"]["output"]]
        found[key] = line
    return found


def _figures(out: Path) -> Any:
    (summary,) = json.loads((out / "metrics.json").read_bytes())
    return summary["agent_metrics"]


def _grown(process: subprocess.Popen[str], path: Path, by: int) -> None:
    """Wait until a file has grown by that many lines, or its writer has ended."""
    lines = path.read_bytes().count(b"\n") if path.exists() else 0
    while process.poll() is None:
        if path.exists() and path.read_bytes().count(b"\n") >= lines + by:
            return
        time.sleep(0.001)


def _tear(path: Path, rng: random.Random) -> None:
    """Leave part of the last line only, as a machine that goes down with its process may."""
    if path.exists() and (size := path.stat().st_size):
        with path.open("rb+") as file:
            file.truncate(max(0, size - rng.randrange(80)))


def test_twenty_kills_neither_repeat_nor_drop_a_rollout(start: Start, gymsdk: Command, there: Path) -> None:
    rng = random.Random(20)
    rollouts = there / "out" / "rollouts.jsonl"
    for number in range(KILLS):
        process = start(*WORDS, "-o", "out", "--resume")
        if number % 4 == 0:
            time.sleep(rng.uniform(0.0, 0.5))
        else:
            _grown(process, rollouts, rng.randrange(1, 14))
        process.send_signal(signal.SIGKILL)
        assert process.wait(timeout=30) == -signal.SIGKILL
        if number % 3 == 0:
            _tear(rollouts, rng)

    assert gymsdk(*WORDS, "-o", "out", "--resume").code == 0
    assert gymsdk(*WORDS, "-o", "whole").code == 0
    assert _told(there / "out").keys() == {(task, repeat) for task in range(TASKS) for repeat in range(REPEATS)}
    assert _told(there / "out") == _told(there / "whole")
    own, whole = _figures(there / "out"), _figures(there / "whole")
    assert {key: pytest.approx(value) for key, value in whole.items()} == own


def test_a_run_killed_at_any_change_of_the_folder_can_be_resumed(start: Start, gymsdk: Command, there: Path) -> None:
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
        ended = gymsdk(*new, "--resume")
        if ended.code == 0:
            assert len(_told(there / "out")) == 4
        else:
            # Killed before the old run was touched, which then is still whole.
            assert "--limit was 3, now 4" in ended.err
            assert len(_told(there / "out")) == 3
            assert gymsdk(*old, "--resume").code == 0
        changes += 1
    assert changes >= 15
