"""Fixtures of the command-line tests: run a command in this process, or start it as a separate process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gymsdk.cli import main


@dataclass(frozen=True)
class Result:
    """The exit code and the output of a command."""

    code: int
    out: str
    err: str


Command = Callable[..., Result]
Start = Callable[..., "subprocess.Popen[str]"]
StartServer = Callable[..., "tuple[subprocess.Popen[str], dict[str, Any]]"]


@pytest.fixture
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the empty working directory of the test, with its own indexes of runs."""
    folder = tmp_path / "there"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.delenv("GYMSDK_BASE_URL", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


@pytest.fixture
def gymsdk(
    installed: Callable[..., Path], workdir: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Command:
    """Return a function that runs the command line in this process, with the environment `sums` installed."""
    installed()

    def run(*arguments: object) -> Result:
        argv = [str(word) for word in arguments]
        monkeypatch.setattr(sys, "argv", ["gymsdk", *argv])
        with pytest.raises(SystemExit) as caught:
            main(argv)
        code = caught.value.code
        return Result(code if isinstance(code, int) else 0, *capfd.readouterr())

    return run


@pytest.fixture
def start(installed: Callable[..., Path], workdir: Path) -> Iterator[Start]:
    """Yield a function that starts the command line as a process with `sums` installed, and kills it at the end."""
    installed()
    started: list[subprocess.Popen[str]] = []

    def start_process(*arguments: object, **options: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "gymsdk", *map(str, arguments)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
        process = subprocess.Popen(command, text=True, **pipes)  # type: ignore[call-overload]  # options by name
        started.append(process)
        return process

    yield start_process
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def start_server(start: Start) -> StartServer:
    """Return a function that starts a command that serves on free ports, and returns its process and JSON line."""

    def start_ready(*arguments: object) -> tuple[subprocess.Popen[str], dict[str, Any]]:
        process = start(*arguments, *([] if "--port" in arguments else ["--port", 0]), "--json")
        assert process.stdout is not None
        assert process.stderr is not None
        line = process.stdout.readline()
        assert line, process.stderr.read()
        return process, json.loads(line)

    return start_ready
