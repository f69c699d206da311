"""Token counts of prompts: the SDKs of Anthropic and OpenAI ask the model server, which asks the engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from aiohttp import web
from anthropic import APIStatusError, AsyncAnthropic, BadRequestError
from openai import APIStatusError as OpenAIStatusError

from gymsdk import testing
from gymsdk.servers import model as server
from gymsdk.types import Model

from .app_helpers import serve_app
from .proxies import ADD, NAME, PreparedModel, ProxySetup, build_model, run_proxies, sdks

pytestmark = pytest.mark.asyncio(loop_scope="module")

COUNTING = ("vllm", "endpoint-chat", "endpoint-responses")
REQUEST: dict[str, Any] = {
    "model": "any",
    "system": "Be brief.",
    "messages": [{"role": "user", "content": "40 + 2?"}],
    "tools": [{"name": "add", "description": "Add.", "input_schema": ADD}],
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def setup() -> AsyncIterator[ProxySetup]:
    """Yield the proxies that the tests of this module share."""
    async with run_proxies((*COUNTING, "openai-chat")) as running:
        yield running


@pytest.mark.slow
@pytest.mark.parametrize("upstream", COUNTING)
async def test_the_engine_counts(setup: ProxySetup, upstream: str) -> None:
    counted = await setup.anthropic[upstream].messages.count_tokens(**REQUEST)
    async with AsyncAnthropic(base_url=setup.upstream.removesuffix("/v1"), api_key="x") as engine:
        assert counted == await engine.messages.count_tokens(**REQUEST)
    assert counted.input_tokens > len("Be brief.40 + 2?")


@pytest.mark.parametrize("prefix", ["/ng-rollout/r1", "/ng-rollout/r1/training-token-capture"])
async def test_tokens_are_counted_for_a_rollout_too(setup: ProxySetup, prefix: str) -> None:
    anthropic = setup.anthropic["vllm"].with_options(base_url=setup.urls["vllm"] + prefix)
    assert (await anthropic.messages.count_tokens(**REQUEST)).input_tokens


async def test_an_invalid_request_is_rejected_in_anthropics_form(setup: ProxySetup) -> None:
    with pytest.raises(BadRequestError, match="messages must have at least one message"):
        await setup.anthropic["vllm"].messages.count_tokens(model="any", messages=[])


async def test_a_hosted_model_does_not_count(setup: ProxySetup) -> None:
    await expect_rejection(setup.anthropic["openai-chat"])


@pytest.mark.slow
async def test_a_scripted_policy_does_not_count() -> None:
    async with serve_app(server.create_app(PreparedModel())) as url, sdks(url) as (_, anthropic):
        await expect_rejection(anthropic)


@pytest.mark.slow
@pytest.mark.parametrize("status", [200, 404, 405, 501])
async def test_an_engine_without_a_tokenizer_is_asked_once(status: int) -> None:
    paths: list[str] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        paths.append(request.path)
        # llama.cpp's tokenize endpoint accepts no messages, and returns no tokens.
        return web.json_response({"tokens": []}, status=status)

    engine = web.Application()
    engine.router.add_post("/{path:.*}", answer)
    async with testing.serve(engine) as base:
        counting_model: Model = build_model("endpoint-chat", base, wait=0.01)
        async with serve_app(server.create_app(counting_model)) as url, sdks(url) as (_, anthropic):
            await expect_rejection(anthropic.with_options(max_retries=2))
    assert paths == ["/tokenize"]


INPUT: dict[str, Any] = {
    "model": "any",
    "instructions": "Be brief.",
    "input": "40 + 2?",
    "tools": [{"type": "function", "name": "add", "description": "Add.", "parameters": ADD, "strict": True}],
}


@pytest.mark.parametrize("upstream", [*COUNTING, "openai-chat"])
async def test_openais_sdk_counts_the_input(setup: ProxySetup, upstream: str) -> None:
    counted = await setup.openai[upstream].responses.input_tokens.count(**INPUT)
    engine = setup.openai[upstream].with_options(base_url=setup.upstream)
    assert counted.object == "response.input_tokens"
    assert counted == await engine.responses.input_tokens.count(**INPUT)
    items: Any = [{"role": "user", "content": "4"}]
    shorter = await setup.openai[upstream].responses.input_tokens.count(model="any", input=items)
    assert 0 < shorter.input_tokens < counted.input_tokens


@pytest.mark.parametrize("prefix", ["/ng-rollout/r1", "/ng-rollout/r1/training-token-capture"])
async def test_the_input_is_counted_for_a_rollout_too(setup: ProxySetup, prefix: str) -> None:
    openai = setup.openai["vllm"].with_options(base_url=f"{setup.urls['vllm']}{prefix}/v1")
    assert (await openai.responses.input_tokens.count(**INPUT)).input_tokens


async def test_instructions_alone_are_an_input(setup: ProxySetup) -> None:
    assert (await setup.openai["vllm"].responses.input_tokens.count(instructions="Be brief.")).input_tokens


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": 7}, "input"),
        ({"input": [7]}, "input"),
        ({"input": "hi", "tools": 3}, "tools"),
        ({"input": "hi", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": "hi", "conversation": "conv_1"}, "conversation"),
        ({"input": "hi", "stream": True, "tools": 3}, "tools"),
    ],
)
async def test_an_invalid_count_is_rejected_in_openais_form(
    setup: ProxySetup, body: dict[str, Any], param: str
) -> None:
    async with httpx.AsyncClient(base_url=setup.urls["vllm"]) as client:
        response = await client.post("/v1/responses/input_tokens", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)


async def test_a_pause_does_not_hold_a_count(setup: ProxySetup) -> None:
    async with httpx.AsyncClient(base_url=setup.urls["vllm"]) as client:
        await client.post("/pause", json={})
        try:
            assert (await setup.openai["vllm"].responses.input_tokens.count(**INPUT)).input_tokens
        finally:
            await client.post("/resume")


@pytest.mark.parametrize("upstream", ["endpoint-chat", "endpoint-responses", "openai-responses"])
@pytest.mark.parametrize("has_own", [False, True])
async def test_an_engine_is_asked_for_its_own_count(upstream: str, has_own: bool) -> None:
    bodies: dict[str, dict[str, Any]] = {}

    async def answer(request: web.Request) -> web.StreamResponse:
        bodies[request.path] = await request.json()
        if has_own and request.path == "/v1/responses/input_tokens":
            return web.json_response({"object": "response.input_tokens", "input_tokens": 7})
        return web.json_response({"detail": "Not Found"}, status=404)

    engine = web.Application()
    engine.router.add_post("/{path:.*}", answer)
    async with testing.serve(engine) as base:
        model: Model = build_model(upstream, base, extra_body={"top_k": 1}, pinned={"temperature": 1.0})
        async with serve_app(server.create_app(model)) as url, sdks(url) as (openai, _):
            if has_own:
                assert (await openai.responses.input_tokens.count(**INPUT)).input_tokens == 7
            else:
                with pytest.raises(OpenAIStatusError, match="cannot count tokens; read the usage") as caught:
                    await openai.with_options(max_retries=2).responses.input_tokens.count(**INPUT)
                assert (caught.value.status_code, caught.value.code) == (501, "model_cannot_count")
    asked = {"/v1/responses/input_tokens"} | (set() if upstream == "openai-responses" else {"/tokenize"})
    assert bodies.keys() == (asked if not has_own or upstream == "endpoint-chat" else {"/v1/responses/input_tokens"})
    assert bodies["/v1/responses/input_tokens"] == INPUT | {"model": NAME}


async def expect_rejection(anthropic: AsyncAnthropic) -> None:
    with pytest.raises(APIStatusError, match="cannot count tokens; read the usage") as caught:
        await anthropic.messages.count_tokens(**REQUEST)
    assert (caught.value.status_code, caught.value.body["error"]["type"]) == (501, "api_error")  # type: ignore[index]  # JSON
