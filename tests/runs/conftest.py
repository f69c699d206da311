"""Runs that gymsdk has written, and a cache folder of the test's own."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gymsdk.runs import Run, read

Play = Callable[..., Path]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep the indexes of a test in a separate folder."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


@pytest.fixture(scope="session")
def play(tmp_path_factory: pytest.TempPathFactory) -> Play:
    """Play environments with `gymsdk rollout`, and return the folder of the run."""

    def play_into(*arguments: str, name: str = "run") -> Path:
        folder = tmp_path_factory.mktemp("runs") / name
        command = [sys.executable, "-m", "gymsdk", "rollout", *arguments, "--output", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (folder / "rollouts.jsonl").exists(), done.stderr
        return folder

    return play_into


@pytest.fixture(scope="session")
def played(play: Play) -> Path:
    """Return a run of two environments with as many right as wrong rollouts."""
    options = ("--model", "scripted/oracle:0.5", "--split", "train", "--limit", "10", "--repeats", "4")
    return play("tool_call", "multineedle", *options, name="played")


@pytest.fixture
def folder(played: Path, tmp_path: Path) -> Path:
    """Return a copy of the run, which the test may change."""
    return shutil.copytree(played, tmp_path / "copy")


@pytest.fixture
def run(folder: Path) -> Run:
    """Return the run, opened."""
    return read(folder)


RIGHT = ("tool_call", "--split", "train", "--limit", "20", "--repeats", "1", "--model", "scripted/oracle")


@pytest.fixture(scope="session")
def original(play: Play) -> Path:
    """Return a run with the options `RIGHT`, which has only rewards of 1."""
    return play(*RIGHT, name="original")


def run_command(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gymsdk", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, check=False, timeout=120, text=True)
