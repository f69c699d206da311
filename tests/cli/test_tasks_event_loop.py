"""A `tasks` hook may run an event loop in every command and interface."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from sums_environment import PLAIN

from cli.conftest import Command
from gymsdk.gym.env import Env

SOURCE = f"""{PLAIN}
import sqlite3

async def fetched(number):
    await asyncio.sleep(0)
    return number

@hookimpl
def tasks(split: Literal["train", "test"]):
    # A connection belongs to the thread that has opened it.
    with contextlib.closing(sqlite3.connect(":memory:")) as rows:
        for number in range(3):
            (doubled,) = rows.execute("select 2 * ?", [asyncio.run(fetched(number))]).fetchone()
            yield Task.ask(f"What is 2 * {{number}} in {{split}}?", answer=doubled)

@hookimpl
def verify(task, transcript):
    return Verdict(reward=float(transcript.reply == str(task.answer)))

@hookimpl
def solve(task):
    return Message(content=str(task.answer))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ("rollout", "looping", "-o", "out"),
        ("profile", "looping", "--no-plot", "-o", "out"),
        ("tasks", "looping"),
        ("play", "looping", "--model", "scripted/oracle"),
        ("check", "looping", "--only", "runtime"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_tasks_may_run_an_event_loop_in_every_command(
    gymsdk: Command, installed: Callable[..., Path], arguments: tuple[str, ...]
) -> None:
    installed("looping", SOURCE)
    result = gymsdk(*arguments)
    assert result.code == 0, result.err + result.out
    assert "cannot be called from a running event loop" not in result.err


async def test_tasks_may_run_an_event_loop_in_gymnasium_inside_a_running_loop(installed: Callable[..., Path]) -> None:
    installed("looping", SOURCE)
    with Env("looping") as env:
        text, _ = env.reset(seed=1, options={"task": 1})
    assert "What is 2 * 1" in str(text)
