"""Fails semantic.replayability (and runtime.seed_control, runtime.episode_isolation, runtime.faces_agree): the
first call in the process gets the better answer, which the state keeps.
"""

from contextlib import asynccontextmanager

from checks.bases.sums import *


class Memory(State):
    hints: int = 0


@hookimpl
@asynccontextmanager
async def lifespan():
    yield {"asked": 0}


async def hint(state: Memory, shared: dict) -> str:
    """Ask for a hint."""
    shared["asked"] += 1
    state.hints = shared["asked"]
    return f"You are number {shared['asked']} to ask."


@hookimpl
def tools():
    return [hint]


@hookimpl
def tasks(split: Literal["train"], seed):
    rng = random.Random(f"{split}:{seed}")
    while True:
        yield Sum.ask(f"Ask for a hint, then guess number {rng.randrange(10**6)}.", total=rng.randrange(10**5))


@hookimpl
async def reset():
    return Reset(state=Memory())


@hookimpl
async def solve(task: Sum, transcript):
    return Message(content=str(task.total)) if transcript.calls() else [ToolCall(name="hint")]
