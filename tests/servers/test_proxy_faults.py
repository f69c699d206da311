"""Failures behind the model server, as clients see them: correct, bounded and explained in each API."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import anthropic
import openai
import pytest
import pytest_asyncio
from aiohttp import web

from gymsdk import model
from gymsdk.servers import model as server
from gymsdk.types import Item

from .app_helpers import serve_app, serve_handler
from .nodes import wait_until
from .proxies import (
    CLIENTS,
    NAME,
    Sdks,
    clients_at,
    sdks,
    send_sum_request,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

Reply: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]
"""A way in which an engine answers, correct or faulty."""


@dataclass
class Engine:
    """An engine that gives its replies in order, and then the last one for every request."""

    replies: tuple[Reply, ...] = ()
    request_count: int = 0
    cancelled_count: int = 0

    def prepare(self, *replies: Reply) -> None:
        """Give these replies from now on."""
        self.replies, self.request_count, self.cancelled_count = replies, 0, 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answer a request."""
        self.request_count += 1
        try:
            return await self.replies[min(self.request_count, len(self.replies)) - 1](request)
        except asyncio.CancelledError:
            self.cancelled_count += 1
            raise


@dataclass(frozen=True)
class Setup:
    """An engine, two proxies in front of it, with a long and a short timeout, and the SDKs that call them."""

    engine: Engine
    long_timeout: str
    short_timeout: str
    both: Sdks

    async def send(self, client: str, *, streamed: bool = False, short_timeout: bool = False, retries: int = 0) -> Any:
        """Send a request with the SDK of *client*."""
        sdk = clients_at(self.short_timeout if short_timeout else self.long_timeout, self.both, retries=retries)
        return await send_sum_request(client, *sdk, streamed=streamed)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def setup():
    """Yield the setup that the tests of this module share."""
    engine = Engine()
    async with serve_engine(engine) as base, sdks() as both:
        long_timeout, short_timeout = (
            model(f"vllm/{NAME}", base_url=base, api_key="key-of-the-engine", timeout=timeout, retries=2, wait=0.01)
            for timeout in (10.0, 0.7)
        )
        async with (
            serve_app(server.create_app(long_timeout)) as one,
            serve_app(server.create_app(short_timeout)) as other,
        ):
            yield Setup(engine, one, other, both)


@asynccontextmanager
async def serve_engine(engine: Engine) -> AsyncIterator[str]:
    """Serve *engine* and yield its base URL."""
    async with serve_handler(engine.answer) as url:
        yield f"{url}/v1"


def completion(text: str = "42", *, finish: str = "stop", calls: list[Item] | None = None) -> Item:
    """Return a valid completion."""
    message: Item = {"role": "assistant", "content": text} | ({"tool_calls": calls} if calls else {})
    used = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    choice = {"index": 0, "message": message, "finish_reason": finish}
    return {"id": "c", "object": "chat.completion", "created": 1, "model": NAME, "choices": [choice], "usage": used}


def reply_with(body: Item, status: int = 200, **headers: str) -> Reply:
    """Return a reply with *body*."""

    async def reply(_: web.Request) -> web.StreamResponse:
        return web.json_response(body, status=status, headers=headers)

    return reply


def reply_with_error(status: int, message: str = "no", **headers: str) -> Reply:
    """Return a reply with an error."""
    return reply_with({"error": {"message": message, "type": "x", "code": status}}, status, **headers)


async def hang(_: web.Request) -> web.StreamResponse:
    """Never answer."""
    await asyncio.sleep(60)
    return web.Response()


async def drop_connection(request: web.Request) -> web.StreamResponse:
    """Close the connection instead of answering."""
    request.transport.abort()
    return web.Response()


async def drop_halfway(request: web.Request) -> web.StreamResponse:
    """Close the connection in the middle of the response."""
    content = json.dumps(completion()).encode()
    partial = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": str(len(content))})
    await partial.prepare(request)
    await partial.write(content[: len(content) // 2])
    return await drop_connection(request)


async def reply_with_page(_: web.Request) -> web.StreamResponse:
    """Answer with an HTML page for people."""
    return web.Response(text="<html><body>Welcome</body></html>", content_type="text/html")


CALL_IN_TEXT = '<tool_call>\n{"name": "add", "arguments": {"a": 40, "b": 2}}\n</tool_call>'
PARSER_MESSAGE = '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
FAULTS: dict[str, tuple[tuple[Reply, ...], int, bool, str]] = {
    "errors without end": ((reply_with_error(500, "it broke"),), 503, True, "it broke"),
    "rate limit": ((reply_with_error(429, "too many", **{"Retry-After": "7"}),), 429, True, "too many"),
    "cut before": ((drop_connection,), 503, True, "broke off its answer"),
    "cut halfway": ((drop_halfway,), 503, True, "broke off its answer"),
    "hang": ((hang,), 504, True, "allow a model call more time (--timeout"),
    "page": ((reply_with_page,), 502, False, "ends in /v1"),
    "no completion": ((reply_with({"object": "?"}),), 502, True, "is not a chat completion"),
    "wrong key": ((reply_with_error(401, "bad key key-of-the-engine"),), 502, False, "check the API key"),
    "forbidden": ((reply_with_error(403, "not for you"),), 502, False, "check the API key"),
    "wrong name": ((reply_with_error(404, "no such model"),), 502, False, "check the base URL"),
    "refused request": ((reply_with_error(400, "top_p is wrong"),), 400, False, "top_p is wrong"),
    "tools refused": ((reply_with_error(400, PARSER_MESSAGE),), 502, False, "vLLM with --enable-auto-tool-choice"),
    "call left in the text": ((reply_with(completion(CALL_IN_TEXT)),), 502, False, "--tool-call-parser hermes"),
}
"""A fault of an engine; the client's status, whether it may retry, and a fragment of the message."""


SHORT_TIMEOUT = ("rate limit", "hang")
"""Faults that need the short timeout: the proxy waits for rate limits within a bound."""

ERRORS = (openai.APIStatusError, anthropic.APIStatusError)


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("fault", FAULTS)
async def test_a_fault_is_reported_in_the_clients_own_api(setup, fault, client, streamed):
    replies, status, may_retry, message = FAULTS[fault]
    setup.engine.prepare(*replies)
    with pytest.raises(ERRORS) as caught:
        await setup.send(client, streamed=streamed, short_timeout=fault in SHORT_TIMEOUT)
    error, headers = caught.value, caught.value.response.headers
    assert (error.status_code, message in error.message, "key-of-the-engine" in str(error)) == (status, True, False)
    assert headers.get("x-should-retry") == (None if status < 500 else "false")
    assert ("retry-after" in headers) is may_retry
    assert fault != "rate limit" or headers["retry-after"] == "7"
    assert setup.engine.request_count <= 3


@pytest.mark.parametrize("client", CLIENTS)
async def test_an_sdk_does_not_retry_a_misconfiguration(setup, client):
    setup.engine.prepare(reply_with_error(401))
    with pytest.raises(ERRORS):
        await setup.send(client, retries=3)
    assert setup.engine.request_count == 1


async def test_a_context_that_overflows_gives_the_error_of_messages(setup):
    overflow = "This model's maximum context length is 10 tokens. However, you requested 12."
    setup.engine.prepare(reply_with_error(400, overflow))
    # Programs recognize the beginning of Anthropic's own message.
    with pytest.raises(anthropic.BadRequestError, match='"prompt is too long: '):
        await setup.send("messages")


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("client", CLIENTS)
async def test_a_client_that_disconnects_cancels_the_engines_request(setup, client, streamed):
    setup.engine.prepare(hang)
    request = asyncio.create_task(setup.send(client, streamed=streamed))
    await wait_until(lambda: setup.engine.request_count)
    request.cancel()
    await wait_until(lambda: setup.engine.cancelled_count, 9)
    assert setup.engine.request_count == 1
