"""Hold the calls of a model while a trainer updates the model's weights.

A trainer pauses the model server, updates the weights of its engine, and resumes. When the pause has begun, no call is
at the engine: running calls have finished, or have been cut and start again after the pause. New calls wait. No episode
notices more than a longer wait, which does not count against its deadline.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from contextlib import suppress
from typing import Any

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from gymsdk.concurrency import pause_deadline
from gymsdk.errors import Failed
from gymsdk.servers.app import document_endpoint, read_json_object
from gymsdk.servers.errors import RequestRejected
from gymsdk.servers.middleware import json_response
from gymsdk.servers.requests import parse_body
from gymsdk.servers.shared_memory import SharedPause
from gymsdk.threads import resolve_future
from gymsdk.timers import timeout_at
from gymsdk.types import Episode, Item, Model

CUT_SECONDS = 10.0
"""Seconds in which calls that are cut must have ended."""

MAX_PAUSE_SECONDS = 3600.0
"""The longest pause that a trainer can ask for."""

log = logging.getLogger("gymsdk")


class PauseRequest(BaseModel):
    """The body of `POST /pause`.

    Attributes:
        wait_seconds: Seconds in which running calls may finish; the others are cut then. 0 cuts all of them at once.
        max_seconds: Seconds after which the calls go on without `POST /resume`, for a trainer that has died.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    wait_seconds: float = Field(60.0, ge=0, le=MAX_PAUSE_SECONDS)
    max_seconds: float = Field(600.0, gt=0, le=MAX_PAUSE_SECONDS)


class PauseState(BaseModel):
    """The answer of the endpoints.

    Attributes:
        paused: Whether new calls wait.
        running: The number of calls at the engine.
        waiting: The number of calls that wait for the end of the pause.
        cut: The number of calls that the current pause, or the last one, has cut.
    """

    paused: bool
    running: int
    waiting: int
    cut: int


class _RunningCall:
    """A call at the engine, which a pause can cut."""

    __slots__ = ("_loop", "timeout")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
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
        self._running: set[_RunningCall] = set()
        self._waiters: set[asyncio.Future[None]] = set()
        self._pausing: set[asyncio.Future[None]] = set()
        self._cut = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __repr__(self) -> str:
        return repr(self._model)

    async def respond(self, request: Item, *, episode: Episode | None = None) -> Item:
        """Return the model's response, after the end of a pause. A call that a pause cuts starts again."""
        while True:
            call = self._try_to_begin() or await self._wait_to_begin()
            try:
                with call.timeout:
                    return await self._model.respond(request, episode=episode)
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
        return PauseState(paused=self._is_paused, running=len(self._running), waiting=len(self._waiters), cut=self._cut)

    async def pause(self, wait_seconds: float, max_seconds: float) -> PauseState:
        """Hold new calls, and return when no call is at the engine.

        A repeated pause extends the current one.

        Args:
            wait_seconds: Seconds in which running calls may finish, before they are cut.
            max_seconds: Seconds after which the pause ends by itself.

        Raises:
            RequestRejected: Calls that were cut have not ended; the pause continues.
        """
        loop = asyncio.get_running_loop()
        with self._lock:
            self._cut = self._cut if self._is_paused else 0
            self._is_paused = True
            self._pause_number += 1
        if self._shared is not None:
            self._shared.begin(max_seconds)
        loop.call_later(max_seconds, self._expire, self._pause_number, max_seconds)
        if await self._wait_until_idle(wait_seconds) or not self._is_paused:
            return self.state
        running = [*self._running]
        self._cut += len(running)
        for call in running:
            call.cut()
        if not await self._wait_until_idle(CUT_SECONDS):
            raise RequestRejected(503, f"{len(self._running)} calls did not end within {CUT_SECONDS:g} s; pause again")
        return self.state

    def resume(self) -> PauseState:
        """End the pause, and let the waiting calls go on."""
        if self._shared is not None:
            self._shared.end()
        with self._lock:
            self._is_paused = False
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
            self._is_paused = True
            self._pause_number += 1
        asyncio.get_running_loop().call_later(seconds, self._expire, self._pause_number, seconds)

    def _end_call(self, call: _RunningCall) -> None:
        with self._lock:
            self._running.discard(call)
            pausing, self._pausing = (set(), self._pausing) if self._running else (self._pausing, set())
        for waiter in pausing:
            resolve_future(waiter, None)

    async def _wait_until_idle(self, seconds: float) -> bool:
        """Wait for the running calls or the end of the pause, at most *seconds*; return whether no call is running."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with self._lock:
            if not self._running:
                return True
            self._pausing.add(waiter)
        await asyncio.wait({waiter}, timeout=seconds)
        self._pausing.discard(waiter)
        return not self._running

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

    async def pause(request: Request) -> Response:
        """Hold the calls of the model; answers when no call is at the engine."""
        body = parse_body(PauseRequest, await read_json_object(request))
        return _build_response(await model.pause(body.wait_seconds, body.max_seconds))

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


def _build_response(state: PauseState) -> Response:
    return json_response(state.model_dump())
