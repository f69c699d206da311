"""Fails nothing: a picture is kept as bytes in the state."""

from checks.bases.sums import *


class Canvas(State):
    picture: bytes = b"\x89PNG\r\n"


async def paint(state: Canvas, shade: int) -> str:
    """Paint a pixel in a shade from 0 to 255."""
    state.picture += bytes([shade % 256])
    return "painted"


@hookimpl
def tools():
    return [paint]


@hookimpl
def tasks(split: Literal["train"], seed):
    rng = random.Random(f"{split}:{seed}")
    while True:
        shade = rng.randint(10, 250)
        yield Sum.ask(f"Paint one pixel in a shade of {shade} (id {rng.random()}) plus 1.", total=shade + 1)


@hookimpl
async def reset():
    return Reset(state=Canvas())


@hookimpl
async def verify(task: Sum, state: Canvas):
    return Verdict(reward=float(state.picture[6:] == bytes([task.total])))


@hookimpl
async def solve(task: Sum, transcript):
    return Message(content="Done.") if transcript.calls() else [ToolCall(name="paint", arguments={"shade": task.total})]
