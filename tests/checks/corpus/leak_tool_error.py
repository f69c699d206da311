"""Fails semantic.no_solution_leakage: the error message of a tool contains the expected arguments."""

import random
from typing import Annotated, Literal

from pydantic import Field

from gymsdk import Message, Task, ToolCall, Verdict, hookimpl


class Sum(Task):
    total: int


@hookimpl
def tasks(split: Literal["train"], seed):
    rng = random.Random(f"{split}:{seed}")
    while True:
        one, other = rng.randrange(300, 999), rng.randrange(300, 999)
        yield Sum.ask(f"What is {one} + {other}?", total=one + other)


@hookimpl
def solve(task: Sum, transcript):
    if transcript.calls():
        return Message(content="Done.")
    return [ToolCall(name="submit", arguments={"total": task.total})]


async def submit(total: Annotated[int, Field(description="The sum.")], task: Sum) -> str:
    """Hand in the sum."""
    return "right" if total == task.total else f"no, that should have been {task.total}"


@hookimpl
def tools():
    return [submit]


@hookimpl
def verify(task: Sum, transcript):
    handed_in = [(call.parsed() or {}).get("total") for call in transcript.calls("submit")]
    return Verdict(reward=float(handed_in[:1] == [task.total]))
