"""Additions with the argument of a tool as their answer."""

from checks.bases.sums import *


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
