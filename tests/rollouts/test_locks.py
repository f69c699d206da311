"""A process that an environment forked does not keep the lock of the run."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from sums_environment import SUMS

from gymsdk import locks

FORKS = {
    "os.fork": "if not os.fork():\n        linger()",
    "a daemon": "if not os.fork():\n        os.setsid()\n        os.fork() or linger()\n        os._exit(0)",
    "multiprocessing": "multiprocessing.get_context('fork').Process(target=linger).start()",
    "subprocess": "subprocess.Popen([sys.executable, '-c', LINGER])",
    "subprocess with open descriptors": "subprocess.Popen([sys.executable, '-c', LINGER], close_fds=False)",
    "subprocess with a function": "subprocess.Popen([sys.executable, '-c', LINGER], preexec_fn=os.setsid)",
}
"""Ways in which an environment starts a process that outlives it."""

FORKING = """
import multiprocessing, os, subprocess, sys, time, warnings
from pathlib import Path

LINGER = "import os, time; open('pid', 'w').write(str(os.getpid())); time.sleep(120)"

def linger():
    exec(LINGER)
    os._exit(0)

def fork():
    warnings.simplefilter("ignore")
    {fork}
"""


def build_source(fork: str) -> str:
    """Return an environment that starts a process in its first `verify`, waits for it, and goes on slowly."""
    hook = "@hookimpl\nasync def verify("
    start = (
        "    if not Path('pid').exists():\n        fork()\n        while not Path('pid').exists():\n"
        "            time.sleep(0.01)\n    await asyncio.sleep(0.2)\n"
    )
    head, _, tail = SUMS.partition(hook)
    signature, _, body = tail.partition("\n")
    return FORKING.format(fork=fork) + head + hook + signature + "\n" + start + body


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working folder; the process with the id in its file `pid` is killed at the end."""
    folder = tmp_path / "there"
    folder.mkdir()
    monkeypatch.chdir(folder)
    yield folder
    with suppress(FileNotFoundError, ProcessLookupError, ValueError):
        os.kill(int((folder / "pid").read_text()), signal.SIGKILL)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_started(folder: Path) -> bool:
    """Whether the run has a result and the environment's process lives."""
    lines = folder / "out" / "rollouts.jsonl"
    return lines.exists() and bool(lines.read_bytes()) and bool((folder / "pid").read_text())


@pytest.mark.parametrize("fork", FORKS.values(), ids=FORKS)
def test_a_run_resumes_while_a_forked_process_of_a_killed_run_lives(
    fork: str, folder: Path, installed: Callable[..., Path]
) -> None:
    installed(source=build_source(fork))
    words = ["rollout", "sums", "--limit", "12", "--concurrency", "1", "-o", "out"]
    command = [sys.executable, "-m", "gymsdk", *words]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    wait_until(lambda: is_started(folder))
    process.kill()
    process.wait()
    os.kill(int((folder / "pid").read_text()), 0)
    again = subprocess.run([*command, "--resume"], capture_output=True, text=True, check=False, timeout=120)
    assert again.returncode == 0, again.stderr
    os.kill(int((folder / "pid").read_text()), 0)
    assert len((folder / "out" / "rollouts.jsonl").read_text().splitlines()) == 12


def test_two_runs_still_exclude_each_other(folder: Path, installed: Callable[..., Path]) -> None:
    installed(source=build_source(FORKS["os.fork"]))
    words = ["rollout", "sums", "--limit", "40", "--concurrency", "1", "-o", "out"]
    command = [sys.executable, "-m", "gymsdk", *words]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        wait_until(lambda: is_started(folder))
        other = subprocess.run([*command, "--resume"], capture_output=True, text=True, check=False, timeout=120)
    finally:
        process.kill()
        process.wait()
    assert (other.returncode, "another run is writing to out" in other.stderr) == (2, True), other.stderr


def test_a_lock_is_held_until_it_is_closed(tmp_path: Path) -> None:
    descriptor = locks.open_folder(tmp_path)
    locks.lock(descriptor)
    other = locks.open_folder(tmp_path)
    with pytest.raises(BlockingIOError):
        locks.lock(other)
    locks.close_folder(descriptor)
    locks.lock(other)
    locks.close_folder(other)


def test_the_lock_of_a_file_ends_with_its_block_while_a_child_has_the_file_open(tmp_path: Path) -> None:
    program = """
import os, sys, time
from gymsdk.locks import hold_lock
with open("file", "ab") as file, hold_lock(file):
    file.write(b"written")
    if not os.fork():
        time.sleep(60)
        os._exit(0)
print(open("file").read(), flush=True)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program], cwd=tmp_path, stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"written\n"
        with (tmp_path / "file").open("ab") as file:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
