"""What is under way: the requests that are being answered, which get a moment to end when their server does."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web

GRACE = 3.0
"""Seconds that requests under way get when their server is stopped."""

LAST = 1.0
"""Seconds in which those that are cut short are told so."""


class Underway:
    """The tasks that answer; once it is *ending*, no more are taken."""

    def __init__(self) -> None:
        self.ending = False
        self._tasks: set[asyncio.Task[Any]] = set()

    def begun(self) -> None:
        """Count the task that runs until it is done."""
        task = asyncio.current_task()
        assert task is not None, "a handler is called in a task"
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def end(self, grace: float = GRACE) -> None:
        """Wait *grace* seconds for what is under way, and cancel what is left of it."""
        self.ending = True
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=grace)
        late = set(self._tasks)
        for each in late:
            each.cancel()
        if late:
            await asyncio.wait(late, timeout=LAST)


UNDERWAY = web.AppKey("underway", Underway)
"""Where an application keeps it."""
