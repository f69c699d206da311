"""Responses that are streamed as server-sent events if they take long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from fastapi import Response

from gymsdk.edge.errors import CLIENT_CLOSED_REQUEST
from gymsdk.edge.request import (
    Receive,
    Scope,
    Send,
    wait_for_disconnect,
)

HEARTBEAT_SECONDS = 5.0
"""Seconds before a stream without a result starts, and between two heartbeats in it."""


EVENT_STREAM_TYPE = "text/event-stream"


STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
"""Headers that keep proxies from caching a stream or buffering it until it is complete."""


STREAM_START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [
        (name.encode(), value.encode()) for name, value in {"content-type": EVENT_STREAM_TYPE, **STREAM_HEADERS}.items()
    ],
}


@dataclass(frozen=True, slots=True)
class StreamResult:
    """The result of a streamed request.

    Attributes:
        response: The whole response, sent when the stream has not started.
        last_frames: The last frames, sent when it has.
    """

    response: Response
    last_frames: bytes = b""


class StreamedResponse(Response):
    """A response that computes its result while it watches for a disconnect of the client.

    Without `beat` the response waits for the result. With `beat` it becomes a stream if the result takes longer than
    `every` seconds, and sends `beat` as a heartbeat every `every` seconds from then on. If the client disconnects, the
    computation is cancelled.

    Args:
        ending: Computes the result.
        beat: The heartbeat frame, or `None` for a response that is not streamed.
        every: Seconds between heartbeats.
    """

    def __init__(
        self,
        ending: Callable[[], Coroutine[Any, Any, StreamResult]],
        *,
        beat: bytes | None = None,
        every: float = HEARTBEAT_SECONDS,
    ) -> None:
        super().__init__()
        self._ending = ending
        self._beat = beat
        self._every = None if beat is None else every

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response; the request body has been read before."""
        ending, disconnect = asyncio.ensure_future(self._ending()), asyncio.ensure_future(wait_for_disconnect(receive))
        try:
            await asyncio.wait({ending, disconnect}, timeout=self._every, return_when=asyncio.FIRST_COMPLETED)
            if disconnect.done():
                # The client is gone; the status is only counted.
                await Response(status_code=CLIENT_CLOSED_REQUEST)(scope, receive, send)
            elif ending.done():
                await ending.result().response(scope, receive, send)
            else:
                await self._stream(ending, disconnect, send)
        finally:
            tasks: set[asyncio.Future[Any]] = {ending, disconnect}
            for task in tasks:
                task.cancel()
            # No task of a request outlives the request.
            await asyncio.wait(tasks)

    async def _stream(self, ending: asyncio.Task[StreamResult], disconnect: asyncio.Task[None], send: Send) -> None:
        await send(STREAM_START)
        while not (ending.done() or disconnect.done()):
            await send({"type": "http.response.body", "body": self._beat, "more_body": True})
            await asyncio.wait({ending, disconnect}, timeout=self._every, return_when=asyncio.FIRST_COMPLETED)
        if not disconnect.done():
            await send({"type": "http.response.body", "body": ending.result().last_frames})


def stream_frames(frames: bytes) -> Response:
    """Return an event stream of known frames."""
    return Response(frames, media_type=EVENT_STREAM_TYPE, headers=STREAM_HEADERS)
