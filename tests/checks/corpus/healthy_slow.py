"""Fails nothing: an episode takes a third of a second to open."""

from checks.bases.words import *


@hookimpl
async def reset():
    await asyncio.sleep(0.3)
