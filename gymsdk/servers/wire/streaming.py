"""Streaming: an answer that takes its time, kept alive where it is streamed, given up where nobody waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from fastapi import Response

from gymsdk.servers.app import GONE
from gymsdk.servers.door.routing import Receive, Scope, Send

BEAT = 5.0
"""Seconds until a stream begins whose answer is not there yet, and between two signs of life in it."""

EVENTS = "text/event-stream"
HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
"""What keeps those in between from keeping a stream, or holding it back until it is whole."""

BEGINNING = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(name.encode(), value.encode()) for name, value in {"content-type": EVENTS, **HEADERS}.items()],
}


@dataclass(frozen=True, slots=True)
class Ending:
    """How an answer ends: *early* where nothing of it has been sent, *late* as the last frames of its stream."""

    response: Response
    last_frames: bytes = b""


class Pending(Response):
    """An answer that *ending* gives, which is cancelled where the client goes away before.

    With a *beat* it is a stream, which begins after *every* seconds without an ending, and is kept alive by that frame.
    """

    def __init__(
        self, ending: Callable[[], Coroutine[Any, Any, Ending]], *, beat: bytes | None = None, every: float = BEAT
    ) -> None:
        super().__init__()
        self._ending = ending
        self._beat = beat
        self._every = None if beat is None else every

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, its body read."""
        ending, gone = asyncio.ensure_future(self._ending()), asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait({ending, gone}, timeout=self._every, return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                # Nobody reads it; it is counted.
                await Response(status_code=GONE)(scope, receive, send)
            elif ending.done():
                await ending.result().response(scope, receive, send)
            else:
                await self._stream(ending, gone, send)
        finally:
            both: set[asyncio.Future[Any]] = {ending, gone}
            for each in both:
                each.cancel()
            # Nothing of a request outlasts it.
            await asyncio.wait(both)

    async def _stream(self, ending: asyncio.Task[Ending], gone: asyncio.Task[None], send: Send) -> None:
        await send(BEGINNING)
        while not (ending.done() or gone.done()):
            await send({"type": "http.response.body", "body": self._beat, "more_body": True})
            await asyncio.wait({ending, gone}, timeout=self._every, return_when=asyncio.FIRST_COMPLETED)
        if not gone.done():
            await send({"type": "http.response.body", "body": ending.result().last_frames})


def streamed(frames: bytes) -> Response:
    """Give a stream whose *frames* are all there."""
    return Response(frames, media_type=EVENTS, headers=HEADERS)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
