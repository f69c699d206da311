"""Fails runtime.side_effects: `reset` seeds the global generator."""

from checks.bases.sums import *


@hookimpl
async def reset(seed):
    random.seed(seed)
    return Reset()
