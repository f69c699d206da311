"""Fails nothing: a simulated user asks for one thing after another; there are no tools."""

from checks.bases.sums import *


class Wish(Task):
    wants: list[str]


class Talk(State):
    given: int = 0
    angry: int = 0


COLOURS = ("red", "green", "blue", "black", "white", "brown")


@hookimpl
def tasks(split: Literal["train", "test"], seed):
    rng = random.Random(f"{split}:{seed}")
    while True:
        wants = rng.sample([f"{colour} {number}" for colour in COLOURS for number in range(100, 400)], 3)
        yield Wish.ask(f"Hello, I want three things. First {wants[0][::-1]}, read backwards.", wants=wants)


@hookimpl
async def reset():
    return Reset(state=Talk())


@hookimpl
async def step(task: Wish, state: Talk, action):
    if not isinstance(action, Message):
        return None
    if action.text.strip() != task.wants[state.given]:
        state.angry += 1
        return Step(messages=["That is not it."], done=state.angry > 2)
    state.given += 1
    if state.given == len(task.wants):
        return Step(messages=["Thank you!"], done=True)
    return Step(messages=[f"Good. Next: {task.wants[state.given][::-1]}, read backwards."])


@hookimpl
async def verify(task: Wish, state: Talk):
    return Verdict(reward=float(state.given == len(task.wants)))


@hookimpl
async def solve(task: Wish, state: Talk):
    return Message(content=task.wants[state.given])
