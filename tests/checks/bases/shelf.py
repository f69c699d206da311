"""A shelf that a policy puts books on, with state, tools and a verdict."""

import random
from typing import Literal

from gymsdk import Claims, Message, Reset, State, Task, ToolCall, Verdict, hookimpl


class Order(Task):
    """Which book is to stand on the shelf."""

    book: str


class Shelf(State):
    """What stands on it."""

    books: list[str] = []


async def put(state: Shelf, book: str) -> str:
    """Put a book on the shelf."""
    state.books.append(book)
    return f"{len(state.books)} on the shelf"


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
async def verify(task: Order, state: Shelf):
    return Verdict(reward=float(state.books == [task.book]))


@hookimpl
async def close(state: Shelf):
    state.books.clear()


@hookimpl
async def solve(task: Order, transcript):
    return Message(content="Done.") if transcript.calls() else [ToolCall(name="put", arguments={"book": task.book})]
