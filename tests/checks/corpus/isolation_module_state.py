"""Fails runtime.episode_isolation (and semantic.oracle_max, runtime.faces_agree): the state of an episode
is kept in the module, where the next reset overwrites it.
"""

from checks.bases.shelf import *

BASKET: list[str] = []


async def put(book: str) -> str:
    """Put a book on the shelf."""
    BASKET.append(book)
    return f"{len(BASKET)} on the shelf"


@hookimpl
async def reset():
    BASKET.clear()
    return Reset()


@hookimpl
async def verify(task: Order):
    return Verdict(reward=float([task.book] == BASKET))


del close
