"""Fails nothing: a path of twenty moves, all of which even the best policy needs."""

import random
from typing import Literal

from gymsdk import Message, Reset, State, Task, ToolCall, Verdict, hookimpl


class Path(Task):
    """The way."""

    way: list[str]


class At(State):
    """Where."""

    at: int = 0


async def go(state: At, task: Path, direction: Literal["up", "down", "left", "right"]) -> str:
    """Go in a direction."""
    if state.at < len(task.way) and task.way[state.at] == direction:
        state.at += 1
        return "on"
    state.at = 0
    return "back at the start"


@hookimpl
def tools():
    return [go]


@hookimpl
def tasks(split: Literal["train"], seed):
    rng = random.Random(f"{split}:{seed}")
    while True:
        way = rng.choices(["up", "down", "left", "right"], k=20)
        yield Path.ask(
            "Go this way, one step at a time, and look after each: " + " ".join(move.upper() for move in way), way=way
        )


@hookimpl
async def reset():
    return Reset(state=At())


@hookimpl
async def verify(task: Path, state: At):
    return Verdict(reward=float(state.at == len(task.way)))


@hookimpl
async def solve(task: Path, state: At):
    return (
        Message(content="Done.")
        if state.at == len(task.way)
        else [ToolCall(name="go", arguments={"direction": task.way[state.at]})]
    )
