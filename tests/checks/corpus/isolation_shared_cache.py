"""Fails runtime.episode_isolation (and runtime.faces_agree): guesses are counted in `shared`, which belongs to all
episodes.
"""

from contextlib import asynccontextmanager

from checks.bases.sums import *

PATIENCE = 3


@hookimpl
@asynccontextmanager
async def lifespan():
    yield {"guesses": 0}


@hookimpl
def tasks(split: Literal["train"], seed):
    rng = random.Random(f"{split}:{seed}")
    while True:
        yield Sum.ask(f"Guess number {rng.randrange(10**6)}, between 0 and 99999.", total=rng.randrange(10**5))


@hookimpl
async def reset(shared):
    shared["guesses"] = 0
    return Reset()


@hookimpl
async def step(task: Sum, action, shared):
    if not isinstance(action, Message):
        return None
    shared["guesses"] += 1
    over = action.text.strip() == str(task.total) or shared["guesses"] == PATIENCE
    return Step(messages=[] if over else [f"Wrong, that was guess {shared['guesses']}."], done=over)
