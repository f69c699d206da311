"""tool_call: a personal assistant with typed tools, graded on what it did.

Its world (weather, address book, calendar, notes, messages, ...) belongs to the episode. Rows that bring a ground
truth of calls, and weather rows that bring neither, are graded on the calls made.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from gymsdk import Action, Claims, Message, Reset, Rollout, Step, ToolCall, Transcript, hookimpl

from . import chance, generator, grading, oracle
from .figures import figures
from .generator import Split
from .grading import Graded
from .records import Records
from .rows import Request
from .settings import Settings
from .tools import TOOLS, Tool
from .tools.answers import error

RECEIVED = "Received."
"""The answer to a call of a tool that only its row knows."""

NO_OBJECT = json.dumps(error("the arguments are not a JSON object; write them as one"))


@hookimpl
async def reset(task: Request) -> Reset:
    """Open with the records of the row's world."""
    return Reset(state=task.world.records, tools=task.offered)


@hookimpl
async def step(task: Request, action: Action) -> Step | None:
    """Acknowledge a call of a row that is graded by its calls; leave the rest to the floor."""
    if task.ground_truth is None or not isinstance(action, ToolCall):
        return None
    return Step(output=NO_OBJECT if action.parsed() is None else RECEIVED)


@hookimpl
async def verify(task: Request, state: Records, transcript: Transcript) -> Graded:
    """Give the verdict on how the world ended, on the calls made, or on whether the weather was asked for."""
    if task.expected is not None:
        return grading.by_end(task, task.expected, state, transcript)
    if task.ground_truth is not None:
        return grading.by_calls(task, task.ground_truth, transcript)
    return grading.by_weather(task, transcript)


@hookimpl
def tools() -> list[Tool]:
    """Give the tools of the assistant."""
    return list(TOOLS.values())


@hookimpl
def tasks(split: Split, seed: int, config: Settings) -> Iterator[Request]:
    """Yield generated requests: 300 to validate with, 10 to look at, to train on as many as are taken."""
    return generator.requests(split, seed, config)


@hookimpl
async def solve(task: Request, transcript: Transcript) -> Message | list[ToolCall]:
    """Give the next calls of the row's plan, then the reply."""
    return oracle.next_move(task, transcript)


@hookimpl
async def claims(task: Request) -> Claims:
    """Claim 1.0 of every row, and what guessing earns."""
    return Claims(maximum=1.0, chance=chance.chance(task))


@hookimpl
def metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Give the mean reward by kind and by number of calls needed, and the share that did what nobody asked for."""
    return figures(rollouts)
