"""Connections to a server: an app called in this process, and an app served on a loopback port."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import httpx
import uvicorn
from aiohttp import web
from fastapi import FastAPI

from gymsdk import testing
from gymsdk.http import client as http


@asynccontextmanager
async def app_client(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client of *app*, within the app's lifespan."""
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://gym.test") as client,
    ):
        yield client


@asynccontextmanager
async def serve_app(app: FastAPI) -> AsyncIterator[str]:
    """Serve *app* on a loopback port and yield its URL."""
    bound = socket.create_server(("127.0.0.1", 0))
    # Accepted sockets inherit the option; without it, each response waits 40 ms for an acknowledgement.
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=1))
    async with asyncio.TaskGroup() as group:
        server_task = group.create_task(server.serve([bound]))
        while not server.started:  # noqa: ASYNC110  # uvicorn has no event for its start
            await asyncio.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{bound.getsockname()[1]}"
        finally:
            await http.aclose()
            server.should_exit = True
            await server_task


@asynccontextmanager
async def serve_handler(handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> AsyncIterator[str]:
    """Serve *handler* at every path and yield the URL."""
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", handler)
    async with testing.serve(application) as url:
        yield url.removesuffix("/v1")
