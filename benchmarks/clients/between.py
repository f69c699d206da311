"""Proxies between a client and a server: one adds streaming, the other removes cookies."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
from aiohttp import web

MAX_BODY_BYTES = 2**28
FORWARDED_HEADERS = ("content-type", "accept", "x-nemo-gym-session-token")


def with_streaming(upstream: str) -> web.Application:
    """Return a proxy for the Chat Completions API of *upstream* that adds streaming."""

    async def chat(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        streams = body.pop("stream", False)
        body.pop("stream_options", None)
        async with (
            aiohttp.ClientSession() as client,
            client.post(f"{upstream}/v1/chat/completions", json=body) as answer,
        ):
            completion = await answer.json()
        if answer.status != 200 or not streams:
            return web.json_response(completion, status=answer.status)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for chunk in _chunks(completion):
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    app = web.Application(client_max_size=MAX_BODY_BYTES)
    app.router.add_post("/v1/chat/completions", chat)
    return app


def _chunks(completion: dict) -> list[dict]:
    (choice,) = completion["choices"]
    message = choice["message"]
    calls = [{"index": index, **call} for index, call in enumerate(message.get("tool_calls") or [])]
    delta = {"role": "assistant", "content": message.get("content"), **({"tool_calls": calls} if calls else {})}
    common = {
        "id": completion["id"],
        "created": completion["created"],
        "model": completion["model"],
        "object": "chat.completion.chunk",
    }
    return [
        common | {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        common | {"choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]},
        common | {"choices": [], "usage": completion["usage"]},
    ]


def without_cookies(upstream: str) -> web.Application:
    """Return a proxy to *upstream* that removes cookies from requests and responses."""

    async def forward(request: web.Request) -> web.Response:
        headers = {key: value for key, value in request.headers.items() if key.lower() in FORWARDED_HEADERS}
        async with (
            aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as client,
            client.request(
                request.method, f"{upstream}{request.path}", data=await request.read(), headers=headers
            ) as answer,
        ):
            return web.Response(body=await answer.read(), status=answer.status, content_type=answer.content_type)

    app = web.Application(client_max_size=MAX_BODY_BYTES)
    app.router.add_route("*", "/{path:.*}", forward)
    return app


@asynccontextmanager
async def serve_app(app: web.Application) -> AsyncIterator[str]:
    """Serve *app* on loopback while the context is open; yield its URL."""
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
