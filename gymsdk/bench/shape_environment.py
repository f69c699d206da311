"""The environment of `gymsdk bench --shape`: rollouts with a given number of tool calls or of user turns.

The environment itself does next to nothing, so that a rollout shows what the host costs. It is not installed as an
environment for users; `gymsdk.bench.shapes.install` registers it for the servers of a benchmark.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, Literal

from pydantic import field_validator

from gymsdk.plugins.hooks import hookimpl
from gymsdk.types import Action, Config, Message, Reset, State, Step, Task, ToolCall, Transcript, Verdict

SHAPE_PATTERN = re.compile("simple|(steps|turns):([1-9][0-9]{0,3})")
"""The shapes: one model call; N tool calls, one after the other, and a reply; or N user turns with a reply each."""


class ShapeConfig(Config):
    """The shape of the rollouts."""

    shape: str = "simple"

    @field_validator("shape")
    @classmethod
    def _check_shape(cls, text: str) -> str:
        if SHAPE_PATTERN.fullmatch(text) is None:
            raise ValueError(f"{text!r} is not a shape; write simple, steps:N or turns:N")
        return text

    @property
    def steps(self) -> int:
        """The number of tool calls."""
        return self._count("steps", 0)

    @property
    def turns(self) -> int:
        """The number of user turns."""
        return self._count("turns", 1)

    def _count(self, kind: str, default: int) -> int:
        name, _, number = self.shape.partition(":")
        return int(number) if name == kind else default


class Sum(Task):
    """A number to which the policy adds 1 several times: with a tool, or once per user turn."""

    number: int
    steps: int
    turns: int


class Progress(State):
    """The replies so far."""

    replies: int = 0


@hookimpl
def tasks(split: Literal["train"], seed: int, config: ShapeConfig) -> Iterator[Sum]:  # noqa: ARG001  # the only split
    """Yield additions of 1, without an end."""
    number = seed
    while True:
        number += 1
        if config.steps:
            prompt = f"Add 1 to {number} with the tool, {config.steps} times in all, and reply with the result."
        else:
            prompt = f"What is {number} + 1?"
        yield Sum.ask(prompt, number=number, steps=config.steps, turns=config.turns)


@hookimpl
async def reset(config: ShapeConfig) -> Reset:
    """Offer the tool only if the shape has tool calls."""
    return Reset(state=Progress(), tools=None if config.steps else [])


async def add_one(value: int) -> str:
    """Add 1 to a number.

    Args:
        value: The number.
    """
    return str(value + 1)


@hookimpl
def tools() -> list[Callable[..., Any]]:
    """Return the tool."""
    return [add_one]


@hookimpl
async def step(task: Sum, state: Progress, action: Action) -> Step | None:
    """Ask for the next sum after each reply but the last; leave tool calls to the default implementation."""
    if isinstance(action, ToolCall):
        return None
    state.replies += 1
    if state.replies >= task.turns:
        return Step(done=True)
    return Step(messages=[Message(role="user", content=f"And what is {task.number + state.replies} + 1?")])


@hookimpl
async def verify(task: Sum, transcript: Transcript) -> Verdict:
    """Accept the last sum, after the given number of tool calls."""
    is_right = transcript.reply == str(task.number + max(task.steps, task.turns))
    return Verdict(reward=float(is_right and len(transcript.calls()) == task.steps))


@hookimpl
async def solve(task: Sum, state: Progress, transcript: Transcript) -> Message | list[ToolCall]:
    """Call the tool until it has been called often enough, then reply."""
    done = len(transcript.calls())
    if done < task.steps:
        return [ToolCall(call_id=f"call_{done}", name="add_one", arguments={"value": task.number + done})]
    return Message(content=str(task.number + max(task.steps, state.replies + 1)))
