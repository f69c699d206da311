"""An environment whose verdict is the number in the session's state.

`workers.py` and the tests of `gymsdk serve --workers` put this folder on `PYTHONPATH`, so that gymsdk finds the
environment as an installed package.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from gymsdk import Config, Message, Reset, State, Task, Verdict, hookimpl


class Settings(Config):
    """The settings.

    Attributes:
        notes: A file to which the environment appends the number of each episode that it opens.
        pause: Seconds that each verdict takes.
    """

    notes: str = ""
    pause: float = 0.0


class Start(Task):
    """A task with the number to begin with."""

    count: int = 0


class Count(State):
    """The number."""

    count: int = 0


class Counted(Verdict):
    """A verdict with the last number."""

    final: int = 0


async def add(count: int, state: Count) -> dict[str, int]:
    """Add to the number."""
    state.count += count
    return {"count": state.count}


@hookimpl
def tools() -> list[object]:
    """Return the tool that adds to the number."""
    return [add]


@hookimpl
def tasks(split: Literal["train"]) -> Iterator[Start]:  # noqa: ARG001  # names the splits
    """Yield tasks that begin with 0, 1, 2, ..."""
    for number in range(10_000):
        yield Start.ask(f"count from {number}", count=number)


@hookimpl
def reset(task: Start, config: Settings) -> Reset:
    """Begin with the number of the task."""
    if config.notes:
        with Path(config.notes).open("a") as file:
            file.write(f"{task.count}\n")
    return Reset(state=Count(count=task.count))


@hookimpl
async def verify(state: Count, config: Settings) -> Counted:
    """Return the number."""
    await asyncio.sleep(config.pause)
    return Counted(reward=1.0, final=state.count)


@hookimpl
def solve() -> Message:
    """Return a reply without a call of the tool."""
    return Message(content="done")
