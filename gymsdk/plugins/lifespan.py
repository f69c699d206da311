"""What an environment shares among its episodes: the value of its `lifespan`, for as long as that lasts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any

from gymsdk.complaints import INTERRUPTS, raised
from gymsdk.errors import BrokenEnvironment, GymsdkError, UsageError

OPENING = 600.0
"""Seconds a `lifespan` may take to begin, and to end."""

log = logging.getLogger("gymsdk")


class Lifespan:
    """The lifespan of environment *name*: *asked* gives it anew each time, and is `None` where there is none.

    What it yielded is *shared*.
    """

    def __init__(self, name: str, asked: Callable[[], AbstractAsyncContextManager[Any] | None] | None) -> None:
        self._where = f"environment {name!r}"
        self._asked = asked
        self._open = AsyncExitStack()
        self._entered = 0
        self._turn = asyncio.Lock()
        self.shared: Any = None

    def check(self) -> None:
        """Raise `UsageError` where it should have begun and has not."""
        if self._asked and not self._entered:
            raise UsageError(f"{self._where} has a lifespan; play it inside `async with environment:`")

    async def begin(self) -> None:
        """Enter it, where nobody has yet; raises `BrokenEnvironment`."""
        async with self._turn:
            if not self._entered:
                await self._begun()
            self._entered += 1

    async def _begun(self) -> None:
        try:
            async with asyncio.timeout(OPENING):
                context = self._asked() if self._asked else None
                self.shared = await self._open.enter_async_context(context) if context is not None else None
        except (GymsdkError, *INTERRUPTS):
            raise
        except BaseException as error:
            raise BrokenEnvironment(f"{self._where}: hook 'lifespan' raised {raised(error)}") from error

    async def end(self) -> None:
        """Leave it, with the last who entered.

        What goes wrong is told in a warning, since it changes nothing that was graded.
        """
        async with self._turn:
            self._entered -= 1
            if not self._entered:
                await self._ended()

    async def _ended(self) -> None:
        self.shared = None
        try:
            async with asyncio.timeout(OPENING):
                await self._open.aclose()
        except INTERRUPTS:
            raise
        except BaseException as error:  # noqa: BLE001  # an author's code may raise anything
            log.warning("%s: hook 'lifespan' did not end well: %r", self._where, error)
