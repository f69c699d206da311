"""Commands on other consoles, without standard files, in folders that disappear, and at an early Ctrl-C."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from sums_environment import PLAIN

from cli.conftest import Start

ROW = {"responses_create_params": {"input": "¿Cuánto es 1 + 1? → 二 🎉"}, "answer": 2}

MOVING = f"""{PLAIN}
import tempfile

@hookimpl
@contextlib.asynccontextmanager
async def lifespan():
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        yield

@hookimpl
def verify():
    with tempfile.TemporaryDirectory() as scratch, contextlib.chdir(scratch):
        time.sleep(0.05)
        return Verdict(reward=float(os.path.samefile(os.getcwd(), scratch)))
"""


def run(command: str, **variables: str) -> subprocess.CompletedProcess[bytes]:
    """Run *command* in a shell, where `gymsdk` is the command line."""
    script = f'gymsdk() {{ "{sys.executable}" -P -m gymsdk "$@"; }}; {command}'
    return subprocess.run(
        ["bash", "-c", script], env={**os.environ, **variables}, capture_output=True, timeout=100, check=False
    )


@pytest.fixture
def folder(installed: Callable[..., Path], workdir: Path) -> Path:
    """Return the working folder, with the environment `sums` installed."""
    installed()
    return workdir


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "ascii:surrogateescape", "utf-8"])
def test_every_console_shows_a_run(folder: Path, encoding: str) -> None:
    (folder / "rows.jsonl").write_text(json.dumps(ROW) + "\n")
    variables = {"PYTHONIOENCODING": encoding}
    assert run("gymsdk rollout sums --tasks rows.jsonl --model scripted/echo -o run", **variables).returncode == 0
    for command in ("show run", "show run 0:0", "play sums --tasks rows.jsonl --model scripted/echo"):
        done = run(f"gymsdk {command}", **variables)
        assert (done.returncode, b"Traceback" in done.stderr) == (0, False), done.stderr
    opening = json.loads(run("gymsdk play sums --tasks rows.jsonl --model scripted/echo --json", **variables).stdout)
    assert opening["opening"][0]["content"].startswith("¿Cuánto es 1 + 1? → 二")


@pytest.mark.slow
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&-", "<&- >&- 2>&-"])
def test_a_command_runs_without_standard_files(folder: Path, closed: str) -> None:
    done = run(f"gymsdk rollout sums --limit 2 --model scripted/oracle -o run {closed}")
    assert done.returncode == 0, done.stderr
    assert len((folder / "run" / "rollouts.jsonl").read_text().splitlines()) == 2


@pytest.mark.slow
@pytest.mark.parametrize("variable", ["PYTHONASYNCIODEBUG", "PYTHONDEVMODE"])
def test_a_command_runs_in_the_debug_mode_of_asyncio(folder: Path, variable: str) -> None:
    done = run("gymsdk rollout sums --limit 2 --model scripted/oracle -o run", **{variable: "1"})
    assert done.returncode == 0, done.stderr
    assert len((folder / "run" / "rollouts.jsonl").read_text().splitlines()) == 2


@pytest.mark.slow
@pytest.mark.parametrize("module", ["gymsdk.cli", "typer", "gymsdk.cli.list"])
def test_ctrl_c_before_the_command_begins_exits_without_a_traceback(module: str) -> None:
    program = f"""
import importlib.abc, os, signal, sys
class Interrupt(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
sys.argv = ["gymsdk", "list"]
from gymsdk.__main__ import main
main()
"""
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
@pytest.mark.parametrize("command", ["list", "--help", "info sums", "config"])
def test_a_full_disk_behind_standard_output_is_named(folder: Path, command: str) -> None:
    done = run(f"gymsdk {command} > /dev/full")
    assert (done.returncode, done.stderr) == (1, b"Error: cannot write: No space left on device\n")


@pytest.mark.slow
def test_a_removed_working_folder_is_named(folder: Path) -> None:
    commands = ["rollout sums --limit 2", "show run", "new my-env", "list"]
    outputs = [run(f"mkdir gone && cd gone && rmdir ../gone && gymsdk {command}") for command in commands]
    assert [done.returncode for done in outputs] == [2, 2, 2, 0]
    for done in outputs[:3]:
        assert done.stderr.startswith(b"Error: the working folder has been removed; change to another folder")


@pytest.mark.slow
@pytest.mark.parametrize("removed", ["working", "output"])
def test_a_folder_may_be_removed_while_a_run_plays(start: Start, workdir: Path, tmp_path: Path, removed: str) -> None:
    output = tmp_path / "run"
    process = start(
        "rollout", "sums", "--limit", "1000", "--concurrency", "1", "--model", "scripted/oracle", "-o", output
    )
    deadline = time.monotonic() + 60
    # As early as possible: the run must also say so if it misses the folder while it starts.
    while not (output / "run.json").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    shutil.rmtree(workdir if removed == "working" else output)
    _, errors = process.communicate(timeout=60)
    assert "Traceback" not in errors
    if removed == "working":
        assert process.returncode == 0, errors
        assert len((output / "rollouts.jsonl").read_text().splitlines()) == 1000
    else:
        assert process.returncode == 1
        assert f"Error: {output} has been removed while the run was writing to it" in errors


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux gives a thread a working folder of its own")
def test_an_environment_may_change_the_working_folder(installed: Callable[..., Path], workdir: Path) -> None:
    installed("moving", MOVING)
    done = run("gymsdk rollout moving --limit 12 --concurrency 6 --model scripted/oracle -o run")
    assert done.returncode == 0, done.stderr
    lines = (workdir / "run" / "rollouts.jsonl").read_text().splitlines()
    assert [json.loads(line)["reward"] for line in lines] == [1.0] * 12
