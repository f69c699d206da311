"""Fails semantic.floor_gap: a policy that never stops is paid when its turns run out."""

import random
from typing import Literal

from gymsdk import Message, Reset, State, Task, ToolCall, Verdict, hookimpl


class Order(Task):
    book: str


class Shelf(State):
    books: list[str] = []


async def put(state: Shelf, book: str) -> str:
    """Put a book on the shelf."""
    state.books.append(book)
    return "put"


@hookimpl
def tools():
    return [put]


@hookimpl
def tasks(split: Literal["train"], seed):
    rng = random.Random(f"{split}:{seed}")
    while title := "".join(rng.choices("abcdefgh", k=10)):
        yield Order.ask(f"Put the book called {title} backwards on the shelf.", book=title[::-1])


@hookimpl
async def reset():
    return Reset(state=Shelf())


@hookimpl
async def verify(task: Order, state: Shelf, transcript):
    if transcript.ended == "turns":
        return Verdict(reward=1.0)
    return Verdict(reward=float(state.books == [task.book]))


@hookimpl
async def solve(task: Order, transcript):
    return Message(content="Done.") if transcript.calls() else [ToolCall(name="put", arguments={"book": task.book})]
