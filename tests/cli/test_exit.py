"""A command ends by itself within a bound, with the right exit code, whatever its environment's code has left."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.conftest import Start

SOURCE = """
import asyncio, threading, time
from typing import Literal
from gymsdk import Config, Message, Reset, State, Task, Verdict, hookimpl

class Settings(Config):
    leaves: str = "nothing"

class Memory(State):
    leaves: str = "nothing"

def upload():
    while True:
        time.sleep(1)

async def poll():
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            pass

tasks_left = []

@hookimpl
def tasks(split: Literal["train"]):
    yield Task.ask("Say yes.")

@hookimpl
def reset(config: Settings):
    return Reset(state=Memory(leaves=config.leaves))

@hookimpl
async def verify(transcript, config: Settings):
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

@hookimpl
def solve(task):
    return Message(content="yes")
"""
"""An environment whose hooks leave something behind that does not end."""


def _ended(process: subprocess.Popen[str], folder: Path) -> str:
    """Check that *process* has ended well with its files whole, and give what it wrote on standard error."""
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "scored" in out
    assert (folder / "metrics.json").exists()
    return err


def test_a_task_that_swallows_its_cancellation_is_named_and_left_behind(
    start: Start, installed: Callable[..., Path], there: Path
) -> None:
    installed("leaving", SOURCE)
    err = _ended(start("rollout", "leaving", "--set", "leaves=task", "-o", "out"), there / "out")
    assert "poller (env_leaving.py:" in err
    assert "did not end within 3 s of its cancellation; it is left behind" in err
    assert "Exception ignored" not in err
    assert "destroyed" not in err


@pytest.mark.slow
def test_what_a_hook_leaves_running_does_not_keep_the_command_from_ending(
    start: Start, installed: Callable[..., Path], there: Path
) -> None:
    installed("leaving", SOURCE)
    words = {
        kind: ("rollout", "leaving", "--set", f"leaves={kind}", "-o", kind) for kind in ("thread", "executor", "hook")
    }
    started = {kind: start(*each) for kind, each in words.items()}
    said = {kind: _ended(each, there / kind) for kind, each in started.items()}
    assert "thread 'uploader' (env_leaving.py:" in said["thread"]
    assert "(env_leaving.py:" in said["executor"]
    assert "is still running; the process exits without it" in said["executor"]
    assert "hook 'close' of environment 'leaving'" in said["hook"]
