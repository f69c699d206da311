"""Fails semantic.floor_gap: the last of five tools ends the episode with full marks."""

from checks.bases.shelf import *


class Shelf(State):
    books: list[str] = []
    submitted: bool = False


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
async def verify(task: Order, state: Shelf):
    return Verdict(reward=float(state.submitted))


del solve
