"""Hold the calls of a model while a trainer updates the model's weights.

A trainer pauses the model server, updates the weights of its engine, and resumes. From the pause on, new calls wait;
running calls finish, or are cut and start again after the pause. The answer says how many calls are still at the
engine. No episode notices more than a longer wait, which does not count against its deadline.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from gymsdk.cluster.shared_memory import SharedPause
from gymsdk.concurrency import resolve_future, timeout_at
from gymsdk.edge.errors import RequestRejected
from gymsdk.edge.openapi import document_endpoint
from gymsdk.edge.request import json_response, read_json_object
from gymsdk.errors import Failed
from gymsdk.once import OnceLogger
from gymsdk.plugins.calls import pause_deadline
from gymsdk.servers.requests import parse_body
from gymsdk.types import Episode, Item, Model

CUT_SECONDS = 10.0
"""Seconds in which calls that are cut must have ended, for clients that send `wait_seconds`."""

CONFIRM_INTERVAL_SECONDS = 0.05
"""Seconds between two requests for the number of calls at the engine, after calls have been cut."""

WAIT_SECONDS_MESSAGE = (
    "POST /pause with wait_seconds is deprecated: send cut_after in the body for the time after which calls are cut,"
    " and ?wait=SECONDS for the longest time until the answer"
)

STILL_RUNNING = 202
"""The status of the answer to a pause that waited in vain for the end of all calls."""

MAX_PAUSE_SECONDS = 3600.0
"""The longest pause that a trainer can ask for."""

log = logging.getLogger("gymsdk")


Query: TypeAlias = Callable[..., Awaitable[Item]]
"""A call of the model."""

CountCalls: TypeAlias = Callable[[], Awaitable[int | None]]
"""Returns the number of calls at the engine, or `None` if the engine does not tell."""


class PauseQuery(BaseModel):
    """The query parameters of `POST /pause`.

    Attributes:
        wait: The longest time until the answer, in seconds. The answer comes when no call is at the engine.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    wait: float = Field(0.0, ge=0, le=MAX_PAUSE_SECONDS, allow_inf_nan=False)


class PauseRequest(BaseModel):
    """The body of `POST /pause`.

    Attributes:
        cut_after: Seconds in which running calls may finish; the others are cut then. 0 cuts all of them at once, and
            `None` none.
        max_seconds: Seconds after which the calls go on without `POST /resume`, for a trainer that has died.
        wait_seconds: Deprecated: `cut_after`, with an answer after the calls have been cut.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    cut_after: float | None = Field(None, ge=0, le=MAX_PAUSE_SECONDS)
    max_seconds: float = Field(600.0, gt=0, le=MAX_PAUSE_SECONDS)
    wait_seconds: float | None = Field(None, ge=0, le=MAX_PAUSE_SECONDS)


class PauseState(BaseModel):
    """The answer of the endpoints.

    Attributes:
        paused: Whether new calls wait.
        running: The number of calls that have begun and not ended.
        waiting: The number of calls that wait for the end of the pause.
        cut: The number of calls that the current pause, or the last one, has cut.
        in_flight: The number of calls that may be at the engine: running calls, and cut calls until the engine
            confirms their end.
        oldest_seconds: The age of the oldest call in flight, `None` if there is none.
    """

    paused: bool
    running: int
    waiting: int
    cut: int
    in_flight: int
    oldest_seconds: float | None


class _RunningCall:
    """A call at the engine, which a pause can cut."""

    __slots__ = ("_loop", "started", "timeout")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.started = time.monotonic()
        self.timeout = timeout_at(None)

    def cut(self) -> None:
        """Cancel the call in its own event loop."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self.timeout.expire)


class PausableModel:
    """A model whose calls can be paused. Calls may come from any event loop of this process.

    Args:
        model: The model.
        shared: The pause that the workers of a deployment share; a worker that starts during a pause finds it there.
    """

    def __init__(self, model: Model, shared: SharedPause | None = None) -> None:
        self._model = model
        self._shared = shared
        self._lock = threading.Lock()
        self._is_paused = False
        self._pause_number = 0
        self._first_number = 0
        self._running: set[_RunningCall] = set()
        self._waiters: set[asyncio.Future[None]] = set()
        self._pausing: set[asyncio.Future[None]] = set()
        self._cut = 0
        self._unconfirmed: list[float] = []
        self._can_confirm = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __repr__(self) -> str:
        return repr(self._model)

    async def respond(self, request: Item, *, episode: Episode | None = None) -> Item:
        """Return the model's response, after the end of a pause. A call that a pause cuts starts again."""
        return await self._run(partial(self._model.respond, request, episode=episode))

    async def complete(self, body: Item) -> Item:
        """Return the model's answer to a Completions request, likewise.

        Raises:
            Failed: The model has no completions (`model_cannot_complete`).
        """
        complete: Query | None = getattr(self._model, "complete", None)
        if complete is None:
            message = f"{self._model!r} has no completions; send a chat completion, or serve the model of an engine"
            raise Failed(message, kind="model_cannot_complete")
        return await self._run(partial(complete, body))

    async def _run(self, query: Query) -> Item:
        while True:
            call = self._try_to_begin() or await self._wait_to_begin()
            try:
                with call.timeout:
                    return await query()
            except TimeoutError:
                if not call.timeout.is_expired:
                    raise
            except Failed:
                # The engine may answer a request that is cut with an error.
                if not call.timeout.is_expired:
                    raise
            finally:
                self._end_call(call)

    @property
    def pausable(self) -> PausableModel:
        """The model itself, which wrappers of it pass on."""
        return self

    @property
    def state(self) -> PauseState:
        """Whether the model is paused, and how many calls run and wait."""
        self._join_shared_pause()
        with self._lock:
            starts = [*self._unconfirmed, *(call.started for call in self._running)]
        return PauseState(
            paused=self._is_paused,
            running=len(self._running),
            waiting=len(self._waiters),
            cut=self._cut,
            in_flight=len(starts),
            oldest_seconds=round(time.monotonic() - min(starts), 3) if starts else None,
        )

    async def pause(self, wait: float, *, cut_after: float | None = None, max_seconds: float) -> PauseState:
        """Hold new calls, and return when no call is at the engine, or after *wait* seconds.

        A repeated pause extends the current one.

        Args:
            wait: The longest time to wait, in seconds.
            cut_after: Seconds in which running calls may finish, before they are cut; `None` cuts none.
            max_seconds: Seconds after which the pause ends by itself.
        """
        loop = asyncio.get_running_loop()
        with self._lock:
            self._cut = self._cut if self._is_paused else 0
            self._begin()
        number = self._pause_number
        if self._shared is not None:
            self._shared.begin(max_seconds)
        loop.call_later(max_seconds, self._expire, number, max_seconds)
        if cut_after is not None:
            loop.call_later(cut_after, self._cut_running, number)
        await self._wait_until_idle(wait)
        return self.state

    async def pause_and_cut(self, wait_seconds: float, max_seconds: float) -> PauseState:
        """Hold new calls, cut running calls after *wait_seconds*, and return when they have ended.

        Raises:
            RequestRejected: Calls that were cut have not ended; the pause continues.
        """
        state = await self.pause(wait_seconds + CUT_SECONDS, cut_after=wait_seconds, max_seconds=max_seconds)
        if state.paused and (state.running or (state.in_flight and self._can_confirm)):
            raise RequestRejected(503, f"{state.in_flight} calls did not end within {CUT_SECONDS:g} s; pause again")
        return state

    def resume(self) -> PauseState:
        """End the pause, and let the waiting calls go on."""
        if self._shared is not None:
            self._shared.end()
        with self._lock:
            self._is_paused = False
            self._unconfirmed = []
            waiters = [*self._waiters, *self._pausing]
            self._waiters, self._pausing = set(), set()
        for waiter in waiters:
            resolve_future(waiter, None)
        return self.state

    def _try_to_begin(self, waiter: asyncio.Future[None] | None = None) -> _RunningCall | None:
        """Register a call. During a pause, return `None`, and resolve *waiter* when the pause ends."""
        self._join_shared_pause()
        with self._lock:
            if not self._is_paused:
                call = _RunningCall(asyncio.get_running_loop())
                self._running.add(call)
                return call
            if waiter is not None:
                self._waiters.add(waiter)
            return None

    async def _wait_to_begin(self) -> _RunningCall:
        """Wait for the end of the pause, and register a call."""
        while True:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            if (call := self._try_to_begin(waiter)) is not None:
                return call
            try:
                with pause_deadline():
                    await waiter
            finally:
                self._waiters.discard(waiter)

    def _join_shared_pause(self) -> None:
        """Begin the pause that another worker began before this one knew of it."""
        if self._is_paused or self._shared is None or (seconds := self._shared.get_remaining_seconds()) <= 0:
            return
        with self._lock:
            self._begin()
        asyncio.get_running_loop().call_later(seconds, self._expire, self._pause_number, seconds)

    def _begin(self) -> None:
        """Begin a pause, or extend the current one."""
        self._pause_number += 1
        if not self._is_paused:
            self._first_number = self._pause_number
        self._is_paused = True

    def _cut_running(self, number: int) -> None:
        # A repeated request, which only goes on waiting, does not revoke the cut.
        if not self._is_paused or number < self._first_number:
            return
        running = [*self._running]
        self._cut += len(running)
        for call in running:
            call.cut()

    def _end_call(self, call: _RunningCall) -> None:
        with self._lock:
            self._running.discard(call)
            # A model in this process has ended with its call.
            if call.timeout.is_expired and self._get_counter() is not None:
                self._unconfirmed.append(call.started)
            pausing, self._pausing = (set(), self._pausing) if self._running else (self._pausing, set())
        for waiter in pausing:
            resolve_future(waiter, None)

    def _get_counter(self) -> CountCalls | None:
        counter: CountCalls | None = getattr(self._model, "count_running", None)
        return counter

    async def _wait_until_idle(self, seconds: float) -> None:
        """Wait until no call is at the engine or the pause ends, at most *seconds*."""
        deadline = time.monotonic() + seconds
        while self._is_paused and (remaining := deadline - time.monotonic()) > 0:
            await self._wait_for_running(remaining)
            await self._confirm_cut_calls()
            if self._running:
                continue
            if not self._unconfirmed or not self._can_confirm:
                return
            await asyncio.sleep(min(CONFIRM_INTERVAL_SECONDS, remaining))

    async def _wait_for_running(self, seconds: float) -> None:
        """Wait for the end of all running calls or of the pause, at most *seconds*."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with self._lock:
            if not self._running:
                return
            self._pausing.add(waiter)
        await asyncio.wait({waiter}, timeout=seconds)
        self._pausing.discard(waiter)

    async def _confirm_cut_calls(self) -> None:
        """Ask the engine for its number of calls: it works on a call for a while after the connection was closed."""
        counter = self._get_counter()
        if not self._unconfirmed or counter is None:
            return
        count = await counter()
        self._can_confirm = count is not None
        if count is not None:
            with self._lock:
                # The oldest remain, because nothing tells which of them have ended.
                self._unconfirmed = sorted(self._unconfirmed)[:count]

    def _expire(self, number: int, seconds: float) -> None:
        if self._is_paused and number == self._pause_number:
            if self._shared is not None and (remaining := self._shared.get_remaining_seconds()) > 0:
                # Another worker has extended the pause.
                asyncio.get_running_loop().call_later(remaining, self._expire, number, seconds)
                return
            log.warning(
                "no POST /resume has arrived %g s after POST /pause; the model's calls go on, perhaps with old weights",
                seconds,
            )
            self.resume()


def add_pause_endpoints(app: FastAPI, model: PausableModel) -> None:
    """Add `POST /pause`, `POST /resume` and `GET /pause` to a model server."""
    once = OnceLogger(log)

    async def pause(request: Request) -> Response:
        """Hold the calls of the model; 202 if `wait` is over and calls are still at the engine."""
        query = parse_body(PauseQuery, dict(request.query_params), where="query")
        body = parse_body(PauseRequest, await read_json_object(request))
        if body.wait_seconds is not None:
            once.warn(WAIT_SECONDS_MESSAGE)
            return _build_response(await model.pause_and_cut(body.wait_seconds, body.max_seconds))
        state = await model.pause(query.wait, cut_after=body.cut_after, max_seconds=body.max_seconds)
        return _build_response(state, STILL_RUNNING if query.wait and state.in_flight else 200)

    async def resume() -> Response:
        """End the pause."""
        return _build_response(model.resume())

    async def get_state() -> Response:
        """Return whether the model is paused, and how many calls run and wait."""
        return _build_response(model.state)

    docs = document_endpoint(PauseRequest.model_json_schema(), required=False)
    app.add_api_route("/pause", pause, methods=["POST"], **docs)
    app.add_api_route("/resume", resume, methods=["POST"], response_model=PauseState)
    app.add_api_route("/pause", get_state, methods=["GET"], response_model=PauseState)


def _build_response(state: PauseState, status: int = 200) -> Response:
    return json_response(state.model_dump(), status=status)
