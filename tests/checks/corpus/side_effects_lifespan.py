"""Fails runtime.side_effects: `lifespan` seeds the global generator."""

from contextlib import asynccontextmanager

from checks.bases.sums import *


@hookimpl
def lifespan():
    return hold()


@asynccontextmanager
async def hold():
    random.seed(7)
    yield None
