"""A connection of a server: uvicorn's HTTP connection with idle timeouts, limits, and a pacer of requests."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from gymsdk.concurrency import SharedTimer, call_at
from gymsdk.http.client import NOT_STARTED_HEADER
from gymsdk.jsonl import dump_json
from gymsdk.servers.request_state import STATE_KEY, RequestState, ServerState

FIRST_REQUEST_SECONDS = 120.0
"""Seconds within which all headers of a request must arrive, after the connection or the previous request.

A client that opens thousands of connections at once sends its first request long after it has connected.
"""

UNREAD_BODY_SECONDS = 30.0
"""Seconds within which the rest of a request's body must arrive after the response was sent."""

MAX_QUEUED_BYTES = 64 * 1024
"""Bytes of a queued request after which reading from its connection pauses."""

MAX_RETRY_AFTER_SECONDS = 60
"""Longest `Retry-After`, in seconds."""

STOPPING_RETRY_AFTER_SECONDS = 5
"""`Retry-After` of a server that stops, in seconds."""

TOO_MANY_CONNECTIONS_MESSAGE = "the server has reached its limit of connections; close some, or try again"
TOO_LONG_HEADERS_MESSAGE = "The headers of the request are too long."
STOPPING_MESSAGE = "the server is stopping; send the request again"

MAX_CHUNK_FRAMING_BYTES = 64
"""The bytes around each chunk of a body, such as its size, that do not count against the limit of the header."""

TARGET_PASS_SECONDS = 0.02
"""Longest time that one pass of the event loop should take, in seconds."""

MAX_QUOTA = 64
"""Most requests that start in one pass."""

MAX_QUOTA_BEHIND = 8
"""Most requests that start in one pass while responses of models wait for their turn.

With more, requests start faster than they end; with fewer, a pass has so little work that its own cost counts.
"""

PACE_MEASURE_SECONDS = 0.5
"""Seconds over which the rate of starts is measured."""


class Pacer:
    """Starts work in the order of arrival, with a bound per pass of the event loop that keeps each pass short.

    One pass runs every callback that is ready. If a server started thousands of requests at once, one pass would take
    seconds, and so would the response to a health check, which takes several passes. The number of starts per pass
    doubles while passes are shorter than `target` seconds and halves while they are longer. It is never less than one,
    so the queue always advances. Work that waits elsewhere, for example for a model, does not lengthen a pass and does
    not hold back other work.

    While `is_behind` says that started work waits for its turn, at most `MAX_QUOTA_BEHIND` pieces start per pass. Then
    work ends before all other work has started, so that the caches of the CPU hold what is in progress.

    Args:
        target: The longest time that one pass should take, in seconds.
        max_quota: The largest number of starts per pass.
        is_behind: Returns whether started work waits for its turn.

    Attributes:
        waited: The seconds that all work has spent in the queue.
    """

    def __init__(
        self,
        *,
        target: float = TARGET_PASS_SECONDS,
        max_quota: int = MAX_QUOTA,
        is_behind: Callable[[], bool] = lambda: False,
    ) -> None:
        self._target = target
        self._max_quota = max_quota
        self._is_behind = is_behind
        self._quota = max_quota
        self._left = max_quota
        self.waited = 0.0
        self._waiting: OrderedDict[Hashable, tuple[Callable[[], None], float]] = OrderedDict()
        self._is_scheduled = False
        self._pass_began = 0.0
        self._starts = 0
        self._period_began = time.monotonic()
        self._rate = 0.0

    def __len__(self) -> int:
        """Return the number of queued pieces of work."""
        return len(self._waiting)

    def may_start(self) -> bool:
        """Return whether work may start now, and count it; otherwise it must wait, with `enqueue`."""
        self._schedule()
        if self._waiting or self._left <= 0:
            return False
        self._left -= 1
        self._starts += 1
        return True

    def enqueue(self, key: Hashable, work: Callable[[], None]) -> None:
        """Run `work` in a later pass; `drop` removes it by its `key`."""
        self._waiting[key] = (work, time.perf_counter())

    def drop(self, key: Hashable) -> None:
        """Remove the queued work of `key`, if there is any."""
        self._waiting.pop(key, None)

    def drain_time(self) -> float:
        """Estimate the seconds until all queued work has started."""
        return len(self._waiting) / self._rate if self._rate else 0.0

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._pass_began = time.perf_counter()
            asyncio.get_running_loop().call_soon(self._next_pass)

    def _next_pass(self) -> None:
        """Adapt the quota to the duration of the last pass, and start queued work."""
        self._is_scheduled = False
        took = time.perf_counter() - self._pass_began
        if took > self._target:
            self._quota = max(1, self._quota // 2)
        elif self._left <= 0:
            self._quota = min(self._max_quota, self._quota * 2)
        self._measure()
        self._left = min(self._quota, MAX_QUOTA_BEHIND) if self._is_behind() else self._quota
        if self._waiting:
            self._schedule()
        while self._waiting and self._left > 0:
            self._left -= 1
            self._starts += 1
            work, queued_at = self._waiting.popitem(last=False)[1]
            self.waited += time.perf_counter() - queued_at
            work()

    def _measure(self) -> None:
        now = time.monotonic()
        if now - self._period_began >= PACE_MEASURE_SECONDS:
            self._rate = self._starts / (now - self._period_began)
            self._starts, self._period_began = 0, now


class Connection(HttpToolsProtocol):
    """uvicorn's HTTP connection with idle timeouts, whose POST requests start through a `Pacer`.

    Requests of other methods, such as health checks, metrics and node reports, start at once: they are cheap and must
    be answered while POST requests wait. A POST request waits as raw bytes until its turn, or until its client
    disconnects.

    A connection beyond the limit is rejected with 503; uvicorn would reject every further request instead.

    The connection creates the `RequestState` of each request.
    """

    def __init__(self, *args: Any, pacer: Pacer, server: ServerState, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._pacer = pacer
        self._server = server
        self._state = RequestState(server)
        self._max_header_bytes = server.limits.header
        self._idle_timer: asyncio.TimerHandle | None = None
        self._body_timer: asyncio.TimerHandle | None = None
        self._keep_alive_timer: SharedTimer | asyncio.TimerHandle | None = None
        self._queued: bytearray | None = None
        self._is_body_complete = True
        self._partial_header_bytes = 0
        self._framing_bytes = 0
        self._disconnect_callbacks: dict[Callable[[], object], None] = {}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # uvicorn's own signature
        """Reject the connection if there are too many; otherwise wait for a request."""
        max_connections, self.limit_concurrency = self.limit_concurrency, None
        super().connection_made(transport)
        if max_connections is not None and len(self.connections) > max_connections:
            transport.write(_build_retry_later_response(TOO_MANY_CONNECTIONS_MESSAGE, self._pacer.drain_time()))
            transport.close()
            return
        self._idle_timer = self.loop.call_later(FIRST_REQUEST_SECONDS, self._close_idle)

    def data_received(self, data: bytes) -> None:
        """Process received bytes, or queue them until their request may start."""
        if self._queued is not None:
            self._queued += data
            if len(self._queued) > MAX_QUEUED_BYTES:
                self.flow.pause_reading()
        elif self._is_waiting and not self._partial_header_bytes and data.startswith(b"POST"):
            # The request arrived in time; from here on the client waits for the server.
            self._stop_idle_timer()
            self._unset_keepalive_if_required()
            if self._pacer.may_start():
                self._receive(data)
            else:
                self._queued = bytearray(data)
                self._pacer.enqueue(self, self._start)
        else:
            self._receive(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all timers, leave the queue, and cancel the work of a request whose client has left."""
        self._queued = None
        self._pacer.drop(self)
        self._stop_idle_timer()
        if self._body_timer is not None:
            self._body_timer.cancel()
        super().connection_lost(exc)
        for callback in [*self._disconnect_callbacks]:
            callback()

    def shutdown(self) -> None:
        """Close an idle connection, or reject a queued request."""
        if self._queued is None:
            super().shutdown()
            return
        self.transport.write(_build_retry_later_response(STOPPING_MESSAGE, STOPPING_RETRY_AFTER_SECONDS))
        self.transport.close()

    def _unset_keepalive_if_required(self) -> None:
        if self._keep_alive_timer is not None:
            self._keep_alive_timer.cancel()
            self._keep_alive_timer = None

    def on_message_begin(self) -> None:
        """Put the state of the request into its scope."""
        super().on_message_begin()
        self._state = RequestState(self._server, self, max_body=self._server.limits.body)
        self.scope[STATE_KEY] = self._state  # type: ignore[literal-required]  # not a key of ASGI

    def on_header(self, name: bytes, value: bytes) -> None:
        """Receive a header field. A field after the body is ignored: it could imitate a field of the header."""
        if self._is_body_complete:
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        """Receive a part of the body."""
        self._framing_bytes -= len(body) + MAX_CHUNK_FRAMING_BYTES
        super().on_body(body)

    def on_headers_complete(self) -> None:
        """Start the request."""
        self._is_body_complete, self._partial_header_bytes, self._framing_bytes = False, 0, 0
        if not self.url.startswith(b"/"):
            # Such as the URL that a forward proxy would get, from which uvicorn would take the path.
            self._state.is_target_valid = False
            self.url = b"/"
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Note that the connection waits for the next request."""
        self._is_body_complete = True
        if self._body_timer is not None:
            self._body_timer.cancel()
            self._body_timer = None
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Wait for the next request; close the connection if the rest of an unread body does not arrive in time.

        This method repeats uvicorn's, which starts a timer of the event loop for each response and has no hook to share
        one timer among the connections.
        """
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self._unset_keepalive_if_required()
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        else:
            idle_until = self.loop.time() + self.timeout_keep_alive
            self._keep_alive_timer = call_at(self.loop, idle_until, self.timeout_keep_alive_handler)
        if not self._is_body_complete and self._body_timer is None:
            self._body_timer = self.loop.call_later(UNREAD_BODY_SECONDS, self._close_unread)

    def take_body(self, state: RequestState) -> bytes | None:
        """Return the body of the request of *state* if all of it has arrived and no part has been read, else `None`."""
        cycle = self.cycle
        if cycle.scope.get(STATE_KEY) is not state or cycle.more_body or cycle.disconnected:
            return None
        if cycle.waiting_for_100_continue or not cycle.message_event.is_set():
            return None
        body = bytes(cycle.body)
        cycle.body = bytearray()
        cycle.message_event.clear()
        self.flow.resume_reading()
        return body

    def break_off(self) -> None:
        """Close the connection in the middle of a response."""
        # Otherwise uvicorn would log an error about the incomplete response.
        self.cycle.disconnected = True
        self.transport.close()

    def add_disconnect_callback(self, callback: Callable[[], object]) -> bool:
        """Call *callback* once the client disconnects; returns `False` if the client has disconnected already."""
        if self.transport.is_closing():
            return False
        self._disconnect_callbacks[callback] = None
        return True

    def remove_disconnect_callback(self, callback: Callable[[], object]) -> None:
        """Do not call *callback* any more."""
        self._disconnect_callbacks.pop(callback, None)

    @property
    def _is_waiting(self) -> bool:
        """Whether the headers of the next request have not arrived completely, and no request is being answered."""
        cycle: RequestResponseCycle | None = self.cycle
        return self._is_body_complete and (cycle is None or cycle.response_complete)

    def _start(self) -> None:
        """Process the queued request."""
        queued, self._queued = self._queued, None
        if queued is not None and not self.transport.is_closing():
            self.flow.resume_reading()
            self._receive(bytes(queued))

    def _receive(self, data: bytes) -> None:
        if self._is_body_complete:
            self._partial_header_bytes += len(data)
        else:
            self._framing_bytes += len(data)
        super().data_received(data)
        if self._partial_header_bytes > self._max_header_bytes:
            self.send_400_response(TOO_LONG_HEADERS_MESSAGE)
        elif not self._is_body_complete and self._framing_bytes > self._max_header_bytes:
            # Such as fields after the body, which the parser would keep.
            self.transport.close()
        # An incomplete request does not extend the timeout.
        if not self._is_waiting:
            self._stop_idle_timer()
        elif self._idle_timer is None and self._partial_header_bytes:
            self._idle_timer = self.loop.call_later(FIRST_REQUEST_SECONDS, self._close_idle)

    def _stop_idle_timer(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None

    def _close_unread(self) -> None:
        self._body_timer = None
        if not self._is_body_complete and self.cycle.response_complete:
            self.transport.close()

    def _close_idle(self) -> None:
        self._idle_timer = None
        if self._is_waiting and self._queued is None:
            self.transport.close()


def _build_retry_later_response(detail: str, seconds: float) -> bytes:
    """Build the raw 503 response for a request that was not started, with a `Retry-After` of `seconds`."""
    body = dump_json({"detail": detail, "stage": "admission", "kind": "too_many", "retryable": True})
    lines = [
        "HTTP/1.1 503 Service Unavailable",
        "content-type: application/json",
        f"retry-after: {min(MAX_RETRY_AFTER_SECONDS, max(1, round(seconds)))}",
        f"{NOT_STARTED_HEADER}: 1",
        "connection: close",
        f"content-length: {len(body)}",
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body
