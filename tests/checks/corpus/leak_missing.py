"""Fails semantic.no_solution_leakage: a lookup tool answers with the missing entry of the row."""

from checks.bases.sums import *


class Order(Task):
    wanted: list[str]


class Basket(State):
    held: list[str] = []


def put(state: Basket, name: str) -> str:
    """Put a thing into the basket by its name."""
    state.held.append(name)
    return "ok"


def look(state: Basket, task: Order) -> dict[str, list[str]]:
    """Look into the basket."""
    return {"held": state.held, "missing": [name for name in task.wanted if name not in state.held]}


@hookimpl
def tools():
    return [put, look]


@hookimpl
def tasks(split: Literal["train"], seed):
    rng = random.Random(f"{split}:{seed}")
    while True:
        wanted = ["".join(rng.choices("bcdfghjklm", k=7)) for _ in range(2)]
        yield Order.ask(f"Put {wanted[0][::-1]} and {wanted[1][::-1]}, read backwards, there.", wanted=wanted)


@hookimpl
def reset():
    return Reset(state=Basket())


@hookimpl
def verify(task: Order, state: Basket):
    return Verdict(reward=float(sorted(state.held) == sorted(task.wanted)))


@hookimpl
def solve(task: Order, transcript):
    calls = [ToolCall(name="put", arguments={"name": name}) for name in task.wanted]
    return Message(content="Done.") if transcript.calls() else calls
