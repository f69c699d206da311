"""Delivery: an answer on its way to a client, whole, or cut, or without the end of its stream."""

from __future__ import annotations

from aiohttp import web

from gymsdk.convert.faces.face import Face, Trouble
from gymsdk.transcript import Item
from gymsdk.values import written

from .faults import LIMITED, Fate

JSON, EVENTS = "application/json", "text/event-stream"


async def delivered(request: web.Request, face: Face, body: Item, answer: Item, fate: Fate) -> web.StreamResponse:
    """Give the *answer* to *body* as its client wants it told, a stream of events or JSON, and as its *fate* is."""
    if not body.get("stream"):
        return await _sent(request, written(answer), JSON, fate)
    frames = [*face.stream_events(answer, body)]
    # What comes last says that all has come.
    kept = frames[: (len(frames) - 1) // 2] if fate.truncated else frames
    return await _sent(request, b"".join(kept), EVENTS, fate)


def json(body: Item, status: int = 200) -> web.Response:
    """Give *body* as an answer."""
    return web.Response(body=written(body), status=status, content_type=JSON)


def refused(face: Face, trouble: Trouble) -> web.Response:
    """Give the answer that tells of *trouble* in the words of the API of *face*."""
    answer = json(face.build_error(trouble), trouble.status)
    if trouble.status == LIMITED:
        answer.headers["Retry-After"] = "1"
    return answer


async def _sent(request: web.Request, whole: bytes, kind: str, fate: Fate) -> web.StreamResponse:
    answer = web.Response(body=whole, content_type=kind)
    if fate.cut is None:
        return answer
    assert request.transport is not None
    if fate.cut == "halfway":
        half = web.StreamResponse(headers={"Content-Type": kind, "Content-Length": str(len(whole))})
        await half.prepare(request)
        await half.write(whole[: len(whole) // 2])
        request.transport.abort()
        return half
    request.transport.abort()
    return answer
