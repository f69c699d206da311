"""Fails semantic.floor_gap: a tool accepts every guess of a small range, and a single right one pays."""

from checks.bases.sums import *


class Guess(Task):
    number: int


class Tried(State):
    right: bool = False


async def guess(state: Tried, task: Guess, number: Annotated[int, Field(ge=1, le=10)]) -> str:
    """Guess the number.

    number: from 1 to 10
    """
    state.right = state.right or number == task.number
    return "noted"


@hookimpl
def tools():
    return [guess]


@hookimpl
def tasks(split: Literal["train"], seed):
    rng = random.Random(f"{split}:{seed}")
    while True:
        number, times = rng.randint(1, 10), rng.randint(20, 900)
        dividend = times * 11 + number - 1
        yield Guess.ask(f"Guess, with the tool, the remainder of {dividend} divided by 11, plus 1.", number=number)


@hookimpl
async def reset():
    return Reset(state=Tried())


@hookimpl
async def verify(state: Tried):
    return Verdict(reward=float(state.right))


@hookimpl
async def solve(task: Guess, transcript):
    call = ToolCall(name="guess", arguments={"number": task.number})
    return Message(content="Done.") if transcript.calls() else [call]


@hookimpl
def claims():
    return Claims(chance=0.1)
