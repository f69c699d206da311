"""Fails nothing: every call costs and a wrong end costs more, so rewards lie between -1 and 0.9."""

from checks.bases.sums import *


class Maze(Task):
    door: str


class Where(State):
    opened: str = ""
    steps: int = 0


def open_door(state: Where, name: str) -> str:
    """Open the door of that name."""
    state.opened = name
    return "opened"


@hookimpl
def tools():
    return [open_door]


@hookimpl
def tasks(split: Literal["train"], seed):
    rng = random.Random(f"{split}:{seed}")
    while word := "".join(rng.choices("abcdefgh", k=8)):
        yield Maze.ask(f"Open the door {word}, its name in capitals.", door=word.upper())


@hookimpl
def reset():
    return Reset(state=Where())


@hookimpl
def step(state: Where, action):
    if isinstance(action, Message):
        return Step(done=True)
    state.steps += 1
    name = (action.parsed() or {}).get("name")
    if action.name != "open_door" or not isinstance(name, str):
        return Step(output="give a name", reward=-0.1)
    state.opened = name
    return Step(output="opened", reward=-0.1)


@hookimpl
def verify(task: Maze, state: Where):
    return Verdict(reward=1.0 if state.opened == task.door else -1.0)


@hookimpl
def claims():
    return Claims(maximum=0.9)


@hookimpl
def solve(task: Maze, transcript):
    call = ToolCall(name="open_door", arguments={"name": task.door})
    return Message(content="Done.") if transcript.calls() else [call]
