"""Fails nothing: a path of twenty moves, all of which even the best policy needs."""

from checks.bases.sums import *

Direction = Literal["up", "down", "left", "right"]


class Path(Task):
    way: list[str]


class At(State):
    at: int = 0


async def go(state: At, task: Path, direction: Direction) -> str:
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
    while way := rng.choices(["up", "down", "left", "right"], k=20):
        yield Path.ask(f"Go this way, one step at a time, and look after each: {' '.join(way).upper()}", way=way)


@hookimpl
async def reset():
    return Reset(state=At())


@hookimpl
async def verify(task: Path, state: At):
    return Verdict(reward=float(state.at == len(task.way)))


@hookimpl
async def solve(task: Path, state: At):
    if state.at == len(task.way):
        return Message(content="Done.")
    return [ToolCall(name="go", arguments={"direction": task.way[state.at]})]
