"""One client's connection: uvicorn's, with bounds on idle time and a paced start of requests."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from gymsdk.http import NOT_STARTED
from gymsdk.servers.door.pacing import Pacer
from gymsdk.values import written

BEGINNING = 120.0
"""Seconds in which a request must have begun: all of its headers, since the connection or the request before.

A client that opens thousands of connections at once sends its first request long after it has connected.
"""

LINGERING = 30.0
"""Seconds in which the rest of a request must have come that has been answered by then."""

HELD = 64 * 1024
"""Bytes of a request that waits for its start beyond which no more is read from its connection."""

LONGEST_PAUSE = 60
"""Seconds that a refused client is asked to wait at most."""

STOPPING_PAUSE = 5
"""Seconds after which a client may come back whom a server refused because it stops."""

FULL = "this server has all the connections it may have; close some, or try again"
STOPPING = "the server is being stopped; send the request again"


class Connection(H11Protocol):
    """A connection that is closed if no request arrives in time, and whose POST requests *pacer* starts.

    Requests of other methods, which ask for health and figures or report a node, start at once: they are cheap and must
    be answered while POST requests wait. A POST request waits as raw bytes until its turn, or until its client
    disconnects.

    A connection beyond the limit is refused with 503 by itself; uvicorn would refuse every further request instead.
    """

    _idle: asyncio.TimerHandle | None = None
    _rest_of: asyncio.TimerHandle | None = None
    _held: bytearray | None = None

    def __init__(self, *args: Any, pacer: Pacer, **given: Any) -> None:
        super().__init__(*args, **given)
        self._pacer = pacer

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Begin to wait for a request."""
        most, self.limit_concurrency = self.limit_concurrency, None
        super().connection_made(transport)
        if most is not None and len(self.connections) > most:
            transport.write(_refusal(FULL, self._pacer.drain_time()))
            transport.close()
            return
        self._start_idle_timer()

    def on_response_complete(self) -> None:
        """Wait for the rest of a request that nobody read to its end, and not for ever."""
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY and self._rest_of is None:
            self._rest_of = self.loop.call_later(LINGERING, self._close_idle)

    def data_received(self, data: bytes) -> None:
        """Pass *data* on, or hold it until its request may start."""
        if self._held is not None:
            self._held += data
            if len(self._held) > HELD:
                self.flow.pause_reading()
        elif self.conn.their_state is h11.IDLE and data.startswith(b"POST"):
            # The client has kept its time: from now on the server makes it wait.
            self._start_body_timer()
            self._unset_keepalive_if_required()
            self._held = bytearray(data)
            self._pacer.start(self, self._start)
        else:
            self._receive(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all timers, and give up the place in the queue."""
        self._held = None
        self._pacer.drop(self)
        self._start_body_timer()
        if self._rest_of is not None:
            self._rest_of.cancel()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Close an idle connection; refuse a request that waits."""
        if self._held is None:
            super().shutdown()
            return
        self.transport.write(_refusal(STOPPING, STOPPING_PAUSE))
        self.transport.close()

    def _start(self) -> None:
        """Pass on the request that was held."""
        held, self._held = self._held, None
        if held is not None and not self.transport.is_closing():
            self.flow.resume_reading()
            self._receive(bytes(held))

    def _receive(self, data: bytes) -> None:
        super().data_received(data)
        # What is no request yet does not prolong the wait for one.
        self._start_idle_timer()

    def _start_idle_timer(self) -> None:
        if self.conn.their_state is not h11.IDLE:
            self._start_body_timer()
        elif self._idle is None:
            self._idle = self.loop.call_later(BEGINNING, self._give_up)

    def _start_body_timer(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None

    def _close_idle(self) -> None:
        self._rest_of = None
        if self.conn.their_state is h11.SEND_BODY and self.conn.our_state is h11.DONE:
            self.transport.close()

    def _give_up(self) -> None:
        self._idle = None
        if self.conn.their_state is h11.IDLE and self._held is None:
            self.transport.close()


def _refusal(detail: str, seconds: float) -> bytes:
    """Return the response that refuses a request which has not been started, to be sent again after some *seconds*."""
    body = written({"detail": detail, "stage": "admission", "kind": "too_many", "retryable": True})
    lines = [
        "HTTP/1.1 503 Service Unavailable",
        "content-type: application/json",
        f"retry-after: {min(LONGEST_PAUSE, max(1, round(seconds)))}",
        f"{NOT_STARTED}: 1",
        "connection: close",
        f"content-length: {len(body)}",
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body
