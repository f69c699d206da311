"""Fixtures of the command line's tests: the command in this process, and as a separate process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from gymsdk.cli import main


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str


Command = Callable[..., Ended]
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder the commands run in."""
    folder = tmp_path / "there"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.delenv("GYMSDK_BASE_URL", raising=False)
    return folder


@pytest.fixture
def gymsdk(
    installed: Callable[..., Path], there: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Command:
    """Run the command line in this process, the environment `sums` installed."""
    installed()

    def run(*words: object) -> Ended:
        arguments = [str(word) for word in words]
        monkeypatch.setattr(sys, "argv", ["gymsdk", *arguments])
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        code = caught.value.code
        return Ended(code if isinstance(code, int) else 0, *capfd.readouterr())

    return run


@pytest.fixture
def start(installed: Callable[..., Path], there: Path) -> Iterator[Start]:
    """Start the command line as a process, the environment `sums` installed; it is killed when the test is over."""
    installed()
    started: list[subprocess.Popen[str]] = []

    def begin(*words: object, **options: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "gymsdk", *map(str, words)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
        process = subprocess.Popen(command, text=True, **pipes)  # type: ignore[call-overload]  # options by name
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()
