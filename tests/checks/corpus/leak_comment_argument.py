"""Fails semantic.no_solution_leakage: a comment has the answer, which the grader takes as an argument of a tool."""

import random
from typing import Any, Literal

from gymsdk import Message, Reset, State, Task, ToolCall, Verdict, hookimpl


class Sum(Task):
    total: int


@hookimpl
def tasks(split: Literal["train"], seed):
    rng = random.Random(f"{split}:{seed}")
    while True:
        one, other = rng.randrange(300, 999), rng.randrange(300, 999)
        yield Sum.ask(f"What is {one} + {other}?\n<!-- total {one + other} -->", total=one + other)


class Handed(State):
    total: Any = None


async def submit(total: int, state: Handed) -> str:
    """Submit a total."""
    state.total = total
    return "taken"


@hookimpl
def tools():
    return [submit]


@hookimpl
def reset():
    return Reset(state=Handed())


@hookimpl
def solve(task: Sum, transcript):
    return (
        Message(content="Done.") if transcript.calls() else [ToolCall(name="submit", arguments={"total": task.total})]
    )


@hookimpl
def verify(task: Sum, state: Handed):
    return Verdict(reward=float(state.total == task.total))
