"""Failures behind the model server, as clients see them: correct, bounded and explained in each API."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import anthropic
import openai
import pytest
import pytest_asyncio
from aiohttp import web

from gymsdk import model, responses, testing
from gymsdk.servers import model as server
from gymsdk.types import Item

from .proxies import CLIENTS, NAME, Said, Sdks, Told, added, asking, at, said, sdks
from .reached import listening

pytestmark = pytest.mark.asyncio(loop_scope="module")

Way: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]
"""How an engine answers, well or not."""


@dataclass
class Engine:
    """An engine that answers one way after the other, the last one for ever."""

    ways: tuple[Way, ...] = ()
    asked: int = 0
    reached: asyncio.Event = field(default_factory=asyncio.Event)
    left: asyncio.Event = field(default_factory=asyncio.Event)

    def goes(self, *ways: Way) -> None:
        """Have it answer so from now on."""
        self.ways, self.asked = ways, 0
        self.reached.clear()
        self.left.clear()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answer a request."""
        self.asked += 1
        self.reached.set()
        try:
            return await self.ways[min(self.asked, len(self.ways)) - 1](request)
        except asyncio.CancelledError:
            self.left.set()
            raise


@dataclass(frozen=True)
class Stage:
    """An engine, a patient and a hasty proxy before it, and the SDKs that ask them."""

    engine: Engine
    patient: str
    hasty: str
    both: Sdks

    async def asked(self, client: str, *, streamed: bool = False, hasty: bool = False, retries: int = 0) -> Any:
        """Have the SDK of *client* ask."""
        sdk = at(self.hasty if hasty else self.patient, self.both, retries=retries)
        return await added(client, *sdk, streamed=streamed)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage() -> AsyncIterator[Stage]:
    """The state shared by the tests of this module."""
    made = Engine()
    async with served(made) as base, sdks() as both:
        patient, hasty = (
            model(f"vllm/{NAME}", base_url=base, api_key="key-of-the-engine", timeout=timeout, retries=2, wait=0.01)
            for timeout in (10.0, 0.7)
        )
        async with listening(server.create_app(patient)) as one, listening(server.create_app(hasty)) as other:
            yield Stage(made, one, other, both)


@asynccontextmanager
async def served(engine: Engine) -> AsyncIterator[str]:
    """The base URL of *engine*."""
    app = web.Application()
    app.router.add_post("/v1/chat/completions", engine.answer)
    async with testing.serve(app) as url:
        yield url


def completion(text: str = "42", *, finish: str = "stop", calls: list[Item] | None = None) -> Item:
    """Return a sound answer."""
    message: Item = {"role": "assistant", "content": text} | ({"tool_calls": calls} if calls else {})
    used = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    choice = {"index": 0, "message": message, "finish_reason": finish}
    return {"id": "c", "object": "chat.completion", "created": 1, "model": NAME, "choices": [choice], "usage": used}


def tells(body: Item, status: int = 200, **headers: str) -> Way:
    """Answer with *body*."""

    async def way(_: web.Request) -> web.StreamResponse:
        return web.json_response(body, status=status, headers=headers)

    return way


def refuses(status: int, message: str = "no", **headers: str) -> Way:
    """Answer with an error."""
    return tells({"error": {"message": message, "type": "x", "code": status}}, status, **headers)


async def hangs(_: web.Request) -> web.StreamResponse:
    """Answer never."""
    await asyncio.sleep(60)
    return web.Response()


async def cuts(request: web.Request) -> web.StreamResponse:
    """Close the connection instead of an answer."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def halves(request: web.Request) -> web.StreamResponse:
    """Close the connection within the answer."""
    whole = json.dumps(completion()).encode()
    half = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": str(len(whole))})
    await half.prepare(request)
    await half.write(whole[: len(whole) // 2])
    return await cuts(request)


async def shows(_: web.Request) -> web.StreamResponse:
    """Answer with a page for people."""
    return web.Response(text="<html><body>Welcome</body></html>", content_type="text/html")


CALLED = '<tool_call>\n{"name": "add", "arguments": {"a": 40, "b": 2}}\n</tool_call>'
PARSER = '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
FAULTS: dict[str, tuple[tuple[Way, ...], int, bool, str]] = {
    "errors without end": ((refuses(500, "it broke"),), 503, True, "it broke"),
    "rate limit": ((refuses(429, "too many", **{"Retry-After": "7"}),), 429, True, "too many"),
    "cut before": ((cuts,), 503, True, "broke off its answer"),
    "cut halfway": ((halves,), 503, True, "broke off its answer"),
    "hang": ((hangs,), 504, True, "raise the timeout"),
    "page": ((shows,), 502, False, "ends in /v1"),
    "no completion": ((tells({"object": "?"}),), 502, True, "is not a chat completion"),
    "wrong key": ((refuses(401, "bad key key-of-the-engine"),), 502, False, "check the API key"),
    "forbidden": ((refuses(403, "not for you"),), 502, False, "check the API key"),
    "wrong name": ((refuses(404, "no such model"),), 502, False, "check the base URL"),
    "refused request": ((refuses(400, "temperature must be positive"),), 400, False, "temperature must be positive"),
    "tools refused": ((refuses(400, PARSER),), 502, False, "start vLLM with --enable-auto-tool-choice"),
    "call left in the text": ((tells(completion(CALLED)),), 502, False, "--tool-call-parser hermes"),
}
"""A fault of an engine; the client's status, whether it may retry, and a fragment of the message."""


HASTY = ("rate limit", "hang")
"""Rate limits are waited for, within a bound."""

ERRORS = (openai.APIStatusError, anthropic.APIStatusError)


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("fault", FAULTS)
async def test_a_fault_is_reported_in_the_clients_own_api(
    stage: Stage, fault: str, client: str, streamed: bool
) -> None:
    ways, status, again, words = FAULTS[fault]
    stage.engine.goes(*ways)
    with pytest.raises(ERRORS) as caught:
        await stage.asked(client, streamed=streamed, hasty=fault in HASTY)
    error = caught.value
    assert (error.status_code, words in error.message, "key-of-the-engine" in str(error)) == (status, True, False)
    assert error.response.headers.get("x-should-retry") == (None if again or status < 500 else "false")
    assert ("retry-after" in error.response.headers) is again
    assert stage.engine.asked <= 3


@pytest.mark.parametrize("client", CLIENTS)
async def test_a_rate_limit_returns_retry_after(stage: Stage, client: str) -> None:
    stage.engine.goes(refuses(429, **{"Retry-After": "7"}))
    with pytest.raises((openai.RateLimitError, anthropic.RateLimitError)) as caught:
        await stage.asked(client, hasty=True)
    assert caught.value.response.headers["retry-after"] == "7"


@pytest.mark.parametrize("way", [refuses(500), refuses(503), cuts, halves], ids=["500", "503", "cut", "half"])
@pytest.mark.parametrize("client", CLIENTS)
async def test_a_burst_of_errors_costs_no_call(stage: Stage, client: str, way: Way) -> None:
    stage.engine.goes(way, way, tells(completion()))
    assert said(await stage.asked(client)) == Said(text="42")
    assert stage.engine.asked == 3


@pytest.mark.parametrize("client", CLIENTS)
async def test_an_sdk_does_not_retry_a_misconfiguration(stage: Stage, client: str) -> None:
    stage.engine.goes(refuses(401))
    with pytest.raises(ERRORS):
        await stage.asked(client, retries=3)
    assert stage.engine.asked == 1


@pytest.mark.parametrize("client", CLIENTS)
async def test_a_context_that_overflows_gives_an_incomplete_response(stage: Stage, client: str) -> None:
    stage.engine.goes(refuses(400, "This model's maximum context length is 10 tokens. However, you requested 12."))
    answer = await stage.asked(client, streamed=True)
    assert (said(answer).text, said(answer).end) == ("", "cut")


@pytest.mark.parametrize("client", CLIENTS)
async def test_a_truncated_response_is_marked(stage: Stage, client: str) -> None:
    stage.engine.goes(tells(completion("4", finish="length")))
    assert said(await stage.asked(client, streamed=True)) == Said(text="4", end="cut")


TORN = '{"a": 40, "b'


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("client", CLIENTS)
async def test_malformed_arguments_of_a_call_are_left_to_the_agent(stage: Stage, client: str, streamed: bool) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": TORN}}
    stage.engine.goes(tells(completion("", finish="tool_calls", calls=[call])))
    answer = await stage.asked(client, streamed=streamed)
    if client == "chat":
        assert answer.choices[0].message.tool_calls[0].function.arguments == TORN
    elif client == "responses":
        assert answer.output[-1].arguments == TORN
    else:
        # In this API, arguments are always an object.
        assert TORN in answer.content[-1].input.values()


@pytest.mark.parametrize("client", CLIENTS)
async def test_a_dead_replica_among_three_costs_no_call(stage: Stage, client: str) -> None:
    dead, told = Engine((cuts,)), Told([responses.build_message("42")])
    async with (
        served(dead) as first,
        testing.serve(testing.build_app(told, name=NAME)) as second,
        testing.serve(testing.build_app(told, name=NAME)) as third,
        listening(server.create_app(asking("vllm", f"{first},{second},{third}", wait=0.01))) as url,
    ):
        urls = [f"{url}/ng-rollout/r{rollout}" for rollout in range(12)]
        answers = await asyncio.gather(*(added(client, *at(each, stage.both), streamed=False) for each in urls))
    assert [said(each).text for each in answers] == ["42"] * 12
    assert dead.asked > 0


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("client", CLIENTS)
async def test_a_client_that_disconnects_cancels_the_engines_request(stage: Stage, client: str, streamed: bool) -> None:
    stage.engine.goes(hangs)
    async with asyncio.timeout(9), asyncio.TaskGroup() as group:
        asking = group.create_task(stage.asked(client, streamed=streamed))
        await stage.engine.reached.wait()
        asking.cancel()
        await stage.engine.left.wait()
    assert stage.engine.asked == 1
