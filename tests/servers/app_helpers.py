"""Connections to a server: an app called in this process, and an app served on a loopback port."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import httpx
from aiohttp import web
from fastapi import FastAPI

from gymsdk import testing
from gymsdk.http import client as http

from . import nodes


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
    async with nodes.serve_app(app) as port:
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            await http.aclose()


@asynccontextmanager
async def serve_handler(handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> AsyncIterator[str]:
    """Serve *handler* at every path and yield the URL."""
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", handler)
    async with testing.serve(application) as url:
        yield url.removesuffix("/v1")
