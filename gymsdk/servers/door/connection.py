"""Connection: one client's, as uvicorn has it, closed where no request comes on it in time."""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

BEGINNING = 30.0
"""Seconds in which a request must have begun: all of its headers, since the connection or the request before."""

LINGERING = 30.0
"""Seconds in which the rest of a request must have come that has been answered by then."""

FULL = b'{"detail":"this server has all the connections it may have; close some, or try again"}'
REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\nconnection: close\r\n"
)


class Connection(H11Protocol):
    """A connection that does not last for ever without a request: uvicorn sees to those alone that had one.

    One beyond the most that may be there at once is told so; uvicorn would answer each of them so from then on.
    """

    _idle: asyncio.TimerHandle | None = None
    _rest_of: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Begin to wait for a request."""
        most, self.limit_concurrency = self.limit_concurrency, None
        super().connection_made(transport)
        if most is not None and len(self.connections) > most:
            transport.write(b"%scontent-length: %d\r\n\r\n%s" % (REFUSAL, len(FULL), FULL))
            transport.close()
            return
        self._watch()

    def on_response_complete(self) -> None:
        """Wait for the rest of a request that nobody read to its end, and not for ever."""
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY and self._rest_of is None:
            self._rest_of = self.loop.call_later(LINGERING, self._cut)

    def data_received(self, data: bytes) -> None:
        """Take what came; what is no request yet does not prolong the wait."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more."""
        self._rest()
        if self._rest_of is not None:
            self._rest_of.cancel()
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

    def _cut(self) -> None:
        self._rest_of = None
        if self.conn.their_state is h11.SEND_BODY and self.conn.our_state is h11.DONE:
            self.transport.close()

    def _give_up(self) -> None:
        self._idle = None
        if self.conn.their_state is h11.IDLE:
            self.transport.close()
