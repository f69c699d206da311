"""Fails runtime.close_once: `close` needs something that only a tool call creates."""

from checks.bases.shelf import *


@hookimpl
async def close(state: Shelf):
    state.books.pop()
