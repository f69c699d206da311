"""A resource for each running event loop, opened on first use and closed with its loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Generic, TypeVar

Held = TypeVar("Held", bound=AbstractAsyncContextManager[Any])


class PerLoop(Generic[Held]):
    """What *opened* gives, one for each running event loop."""

    def __init__(self, opened: Callable[[], Held]) -> None:
        self._opened = opened
        self._held: dict[asyncio.AbstractEventLoop, tuple[Held, AsyncGenerator[None]]] = {}

    async def get(self) -> Held:
        """Give the running loop's own."""
        loop = asyncio.get_running_loop()
        if loop not in self._held:
            held = self._opened()
            lifetime = self._lifetime(loop, held)
            self._held[loop] = (held, lifetime)
            # A loop closes its unfinished async generators before it ends: nobody else is told that it does.
            await anext(lifetime)
        return self._held[loop][0]

    async def aclose(self) -> None:
        """Close the running loop's own, if it is open."""
        if held := self._held.get(asyncio.get_running_loop()):
            await held[1].aclose()

    async def _lifetime(self, loop: asyncio.AbstractEventLoop, held: Held) -> AsyncGenerator[None]:
        async with held:
            try:
                yield
            finally:
                del self._held[loop]
