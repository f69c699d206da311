"""tool_call: a personal assistant with typed tools, graded on the changes it makes and the answer it gives.

Each episode has its own world (weather, address book, calendar, notes, messages, ...). Rows with a `ground_truth`
and weather rows are graded on the tool calls instead.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from gymsdk import Action, Claims, Message, Reset, Rollout, Step, ToolCall, Transcript, hookimpl

from . import generator, grading, oracle
from .generator import Split, ToolCallConfig
from .grading import RequestVerdict, compute_metrics
from .rows import Request
from .tools import TOOLS, Tool
from .tools.answers import error
from .world import Records

RECEIVED = "Received."
"""The output of a tool that only the row defines."""

NO_OBJECT = json.dumps(error("the arguments are not a JSON object; write them as one"))


@hookimpl
async def reset(task: Request) -> Reset:
    """Start an episode with the records of the row's world.

    Args:
        task: The row.

    Returns:
        The initial state and the names of the offered tools (`None`: all tools).
    """
    return Reset(state=task.world.records, tools=task.offered)


@hookimpl
async def step(task: Request, action: Action) -> Step | None:
    """Acknowledge a tool call if the row has a `ground_truth`.

    Args:
        task: The row.
        action: A tool call or a reply.

    Returns:
        The acknowledgement, or `None` to let gymsdk's default `step` handle the action.
    """
    if task.ground_truth is None or not isinstance(action, ToolCall):
        return None
    return Step(output=NO_OBJECT if action.parsed() is None else RECEIVED)


@hookimpl
async def verify(task: Request, state: Records, transcript: Transcript) -> RequestVerdict:
    """Grade an episode in the way that its row requires.

    Args:
        task: The row.
        state: The records at the end of the episode.
        transcript: The transcript of the episode.

    Returns:
        The verdict: on the final records and the answer if the row has `expected`, on the calls if it has
        `ground_truth`, else on the calls of `get_weather`.
    """
    if task.expected is not None:
        return grading.grade_end(task, task.expected, state, transcript)
    if task.ground_truth is not None:
        return grading.grade_calls(task, task.ground_truth, transcript)
    return grading.grade_weather(task, transcript)


@hookimpl
def tools() -> list[Tool]:
    """Return the tools of the assistant."""
    return list(TOOLS.values())


@hookimpl
def tasks(split: Split, seed: int, config: ToolCallConfig) -> Iterator[Request]:
    """Generate requests.

    Args:
        split: `train` (endless), `validation` (300 rows) or `example` (10 rows).
        seed: The same split, seed and settings generate the same rows.
        config: The settings of the environment.

    Returns:
        An iterator over the rows.
    """
    return generator.requests(split, seed, config)


@hookimpl
async def solve(task: Request, transcript: Transcript) -> Message | list[ToolCall]:
    """Return the next calls of the row's plan, or the reply after the last call."""
    return oracle.plan_next_turn(task, transcript)


@hookimpl
async def claims(task: Request) -> Claims:
    """Claim a maximum reward of 1.0, and the expected reward of a guess."""
    return Claims(maximum=1.0, chance=grading.compute_guess_reward(task))


@hookimpl
def metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return the mean rewards by kind and by needed calls, and the share of rollouts with unrequested actions."""
    return compute_metrics(rollouts)
