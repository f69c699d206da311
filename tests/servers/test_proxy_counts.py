"""Token counts of prompts: Anthropic's SDK asks the model server, which asks the engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web
from anthropic import APIStatusError, AsyncAnthropic, BadRequestError

from gymsdk import testing
from gymsdk.servers import model as server
from gymsdk.types import Model

from .app_helpers import serve_app
from .proxies import ADD, PreparedModel, ProxySetup, build_model, run_proxies, sdks

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


async def expect_rejection(anthropic: AsyncAnthropic) -> None:
    with pytest.raises(APIStatusError, match="cannot count tokens; read the usage") as caught:
        await anthropic.messages.count_tokens(**REQUEST)
    assert (caught.value.status_code, caught.value.body["error"]["type"]) == (501, "api_error")  # type: ignore[index]  # JSON
