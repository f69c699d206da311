"""Helpers of the tests of the policy endpoint: deterministic policies, and clients that call them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from gymsdk import responses
from gymsdk.errors import Failed
from gymsdk.responses import build_usage
from gymsdk.testing.endpoint import build_app, serve
from gymsdk.types import Episode, Item, Model

CALLS = (responses.build_function_call("add", '{"a": 1}', "c1"), responses.build_function_call("add", '{"a": 2}', "c2"))
THOUGHT = responses.build_reasoning("two sums, then")
FLAT = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}, "strict": False}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
HELLO = {"messages": [{"role": "user", "content": "hi"}]}
BODIES: dict[str, Item] = {"responses": {"input": "hi"}, "chat/completions": HELLO}
BODIES["messages"] = HELLO | {"max_tokens": 500}
"""A minimal request of each API."""


class FixedModel:
    """A model that returns the same items for every request, or fails, and records the requests."""

    name = "replies"

    def __init__(self, *output: Item, failure: Failed | None = None) -> None:
        self.output = list(output) or [responses.build_message("hello")]
        self.failure = failure
        self.requests: list[Item] = []

    async def respond(self, request: Item, *, episode: Episode | None = None) -> Item:
        self.requests.append(request)
        if self.failure:
            raise self.failure
        return responses.build_response(self.output, model="replies", usage=build_usage(3, 4), request=request)


class SlowModel:
    """A model that answers, or fails, when it is released, and counts its calls and those that were cancelled."""

    name = "slow"

    def __init__(self, failure: Failed | None = None) -> None:
        self.failure = failure
        self.released = asyncio.Event()
        self.started = self.cancelled = 0

    async def respond(self, request: Item, *, episode: Episode | None = None) -> Item:
        self.started += 1
        try:
            await self.released.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.failure:
            raise self.failure
        output = [responses.build_message("hello")]
        return responses.build_response(output, model="slow", usage=build_usage(3, 4), request=request)


@asynccontextmanager
async def endpoint_client(model: Model, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with serve(build_app(model, name="stub", **options)) as url, httpx.AsyncClient(base_url=url) as client:
        yield client


@asynccontextmanager
async def openai(model: Model, **options: Any) -> AsyncIterator[AsyncOpenAI]:
    async with (
        serve(build_app(model, name="stub", **options)) as url,
        AsyncOpenAI(base_url=url, api_key="x", max_retries=0) as client,
    ):
        yield client


@asynccontextmanager
async def anthropic(model: Model, **options: Any) -> AsyncIterator[AsyncAnthropic]:
    async with (
        serve(build_app(model, name="stub", **options)) as url,
        AsyncAnthropic(base_url=url.removesuffix("/v1"), api_key="x", max_retries=0) as client,
    ):
        yield client


def root(client: httpx.AsyncClient, path: str) -> str:
    return str(client.base_url).replace("/v1/", path)
