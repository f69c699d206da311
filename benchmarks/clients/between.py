"""What stands between a client and a server: one that streams an answer, one that loses cookies."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
from aiohttp import web

LARGEST = 2**28
KEPT = ("content-type", "accept", "x-nemo-gym-session-token")


def streaming(upstream: str) -> web.Application:
    """Give what answers Chat Completions by those of *upstream*, as a stream of events where one is asked for."""

    async def chat(request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        streams = asked.pop("stream", False)
        asked.pop("stream_options", None)
        async with (
            aiohttp.ClientSession() as client,
            client.post(f"{upstream}/v1/chat/completions", json=asked) as answer,
        ):
            told = await answer.json()
        if answer.status != 200 or not streams:
            return web.json_response(told, status=answer.status)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for chunk in _chunks(told):
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    app = web.Application(client_max_size=LARGEST)
    app.router.add_post("/v1/chat/completions", chat)
    return app


def _chunks(told: dict) -> list[dict]:
    (choice,) = told["choices"]
    said = choice["message"]
    calls = [{"index": index, **call} for index, call in enumerate(said.get("tool_calls") or [])]
    delta = {"role": "assistant", "content": said.get("content"), **({"tool_calls": calls} if calls else {})}
    about = {"id": told["id"], "created": told["created"], "model": told["model"], "object": "chat.completion.chunk"}
    return [
        about | {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        about | {"choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]},
        about | {"choices": [], "usage": told["usage"]},
    ]


def forgetful(upstream: str) -> web.Application:
    """Give what passes everything on to *upstream* but cookies, in either direction."""

    async def passed(request: web.Request) -> web.Response:
        headers = {key: value for key, value in request.headers.items() if key.lower() in KEPT}
        async with (
            aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as client,
            client.request(
                request.method, f"{upstream}{request.path}", data=await request.read(), headers=headers
            ) as answer,
        ):
            return web.Response(body=await answer.read(), status=answer.status, content_type=answer.content_type)

    app = web.Application(client_max_size=LARGEST)
    app.router.add_route("*", "/{path:.*}", passed)
    return app


@asynccontextmanager
async def listening(app: web.Application) -> AsyncIterator[str]:
    """Serve *app* on loopback while the context is open; gives its URL."""
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
