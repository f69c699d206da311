"""Fails semantic.floor_gap: the last of five tools ends the episode with full marks."""

import random
from typing import Literal

from gymsdk import Reset, State, Task, Verdict, hookimpl


class Order(Task):
    book: str


class Shelf(State):
    books: list[str] = []
    submitted: bool = False


async def put(state: Shelf, book: str) -> str:
    """Put a book on the shelf."""
    state.books.append(book)
    return "put"


async def take(state: Shelf, book: str) -> str:
    """Take a book off the shelf."""
    return "taken" if book in state.books and not state.books.remove(book) else "not there"


async def show(state: Shelf) -> str:
    """Show the shelf."""
    return ", ".join(state.books)


async def count(state: Shelf) -> str:
    """Count the books."""
    return str(len(state.books))


async def submit(state: Shelf) -> str:
    """Hand the shelf in."""
    state.submitted = True
    return "handed in"


@hookimpl
def tools():
    return [put, take, show, count, submit]


@hookimpl
def tasks(split: Literal["train"], seed):
    rng = random.Random(f"{split}:{seed}")
    while title := "".join(rng.choices("abcdefgh", k=10)):
        yield Order.ask(f"Put the book called {title} backwards on the shelf, then submit.", book=title[::-1])


@hookimpl
async def reset():
    return Reset(state=Shelf())


@hookimpl
async def verify(task: Order, state: Shelf):
    return Verdict(reward=float(state.submitted))
