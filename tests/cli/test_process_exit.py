"""A command exits within a time limit and with the right code, even if an environment left threads or tasks running."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from sums_environment import PLAIN

from cli.conftest import Command, Start

SOURCE = f"""{PLAIN}
class Settings(Config):
    leaves: str = "nothing"

class Memory(State):
    leaves: str = "nothing"

def upload():
    while True:
        time.sleep(1)

async def poll():
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(60)

tasks_left = []

@hookimpl
def reset(config: Settings):
    return Reset(state=Memory(leaves=config.leaves))

@hookimpl
async def verify(config: Settings):
    if config.leaves == "thread":
        threading.Thread(target=upload, name="uploader").start()
    if config.leaves == "executor":
        tasks_left.append(asyncio.ensure_future(asyncio.to_thread(upload)))
    if config.leaves == "task":
        tasks_left.append(asyncio.create_task(poll(), name="poller"))
    return Verdict(reward=1.0)

@hookimpl
async def close(state: Memory):
    if state.leaves == "hook":
        await poll()
"""
"""Source of an environment with hooks that leave a running thread or task behind."""


def _finish(process: subprocess.Popen[str], folder: Path) -> str:
    """Check that *process* succeeded and wrote its files, and return its error output."""
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "scored" in out
    assert (folder / "metrics.json").exists()
    return err


@pytest.mark.slow
def test_a_task_that_ignores_its_cancellation_is_named_and_abandoned(
    start: Start, installed: Callable[..., Path], workdir: Path
) -> None:
    installed("leaving", SOURCE)
    err = _finish(start("rollout", "leaving", "--limit", 1, "--set", "leaves=task", "-o", "out"), workdir / "out")
    assert "poller (env_leaving.py:" in err
    assert "did not end within 3 s of its cancellation; it is left behind" in err
    assert "Exception ignored" not in err
    assert "destroyed" not in err


@pytest.mark.slow
def test_running_threads_of_a_hook_do_not_block_the_exit(
    start: Start, installed: Callable[..., Path], workdir: Path
) -> None:
    installed("leaving", SOURCE)
    arguments = {
        kind: ("rollout", "leaving", "--limit", 1, "--set", f"leaves={kind}", "-o", kind)
        for kind in ("thread", "executor", "hook")
    }
    started = {kind: start(*words) for kind, words in arguments.items()}
    errors = {kind: _finish(process, workdir / kind) for kind, process in started.items()}
    assert "thread 'uploader' (env_leaving.py:" in errors["thread"]
    assert "(env_leaving.py:" in errors["executor"]
    assert "is still running; the process exits without it" in errors["executor"]
    assert "hook 'close' of environment 'leaving'" in errors["hook"]


EXITS = f"""{PLAIN}
from pydantic import model_validator

class Settings(Config):
    where: str = "nowhere"

    @model_validator(mode="after")
    def checked(self):
        if self.where == "config":
            sys.exit(0)
        return self

@hookimpl
@contextlib.asynccontextmanager
async def lifespan(config: Settings):
    if config.where == "enter":
        sys.exit(0)
    yield
    if config.where == "leave":
        sys.exit(0)

@hookimpl
def tasks(split: Literal["train"], config: Settings):
    yield Task.ask("Say yes.")
    if config.where == "tasks":
        sys.exit(0)

async def end():
    sys.exit(0)

@hookimpl
async def verify(config: Settings):
    if config.where == "task":
        asyncio.create_task(end())
        await asyncio.sleep(60)
    return Verdict(reward=1.0)
"""
"""Source of an environment that calls `sys.exit(0)` at the place that its setting names."""

ERRORS = {
    "config": "Error: environment 'exits': its config raised SystemExit: 0 (env_exits.py:",
    "enter": "Error: environment 'exits': hook 'lifespan' raised SystemExit: 0 (env_exits.py:",
    "tasks": "Error: environment 'exits': hook 'tasks' raised SystemExit: 0 (env_exits.py:",
    "task": "Error: a background task of an environment ended with SystemExit: 0 (env_exits.py:",
}


@pytest.mark.parametrize("where", ERRORS)
def test_an_exit_in_an_environments_code_is_an_error(
    gymsdk: Command, installed: Callable[..., Path], workdir: Path, where: str
) -> None:
    installed("exits", EXITS)
    result = gymsdk("rollout", "exits", "--set", f"where={where}", "-o", "out")
    assert result.code == 1
    assert result.err.splitlines()[-1].startswith(ERRORS[where])
    assert not (workdir / "out" / "metrics.json").exists()


def test_an_exit_at_the_end_of_a_lifespan_keeps_the_run_complete(
    gymsdk: Command, installed: Callable[..., Path], workdir: Path
) -> None:
    installed("exits", EXITS)
    result = gymsdk("rollout", "exits", "--set", "where=leave", "-o", "out")
    assert (result.code, result.out.split()[1:5]) == (0, ["scored", "1", "of", "1"])
    assert "hook 'lifespan' failed when it ended: SystemExit(0)" in result.err
    assert (workdir / "out" / "metrics.json").exists()
