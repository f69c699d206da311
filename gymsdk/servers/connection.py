"""Connection: one client's, as uvicorn has it, closed where no request comes on it in time."""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

BEGINNING = 30.0
"""Seconds in which a request must have begun: all of its headers, since the connection or the request before."""


class Connection(H11Protocol):
    """A connection that does not last for ever without a request: uvicorn sees to those alone that had one."""

    _idle: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Begin to wait for a request."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Take what came; what is no request yet does not prolong the wait."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more."""
        self._rest()
        super().connection_lost(exc)

    def _watch(self) -> None:
        if self.conn.their_state is not h11.IDLE:
            self._rest()
        elif self._idle is None:
            self._idle = self.loop.call_later(BEGINNING, self._give_up)

    def _rest(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None

    def _give_up(self) -> None:
        self._idle = None
        if self.conn.their_state is h11.IDLE:
            self.transport.close()
