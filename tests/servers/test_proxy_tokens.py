"""Token ids and log-probabilities pass through the model server unchanged."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator

import httpx
import orjson
import pytest
import pytest_asyncio

from gymsdk import responses
from gymsdk.types import Item

from .proxies import ProxySetup, run_proxies

pytestmark = pytest.mark.asyncio(loop_scope="module")

LONG = 65_536
UPSTREAMS = ("vllm", "endpoint-responses")
BODIES: dict[str, Item] = {
    "responses": {"input": "hi"},
    "chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "messages": {"max_tokens": 100_000_000, "messages": [{"role": "user", "content": "hi"}]},
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def setup() -> AsyncIterator[ProxySetup]:
    """Yield the proxies that the tests of this module share."""
    async with run_proxies(UPSTREAMS) as running:
        yield running


def bundle() -> Item:
    """Return the tokens of a prompt of 1,000 tokens and of the longest response."""
    rng = random.Random(7)
    ids = [rng.randrange(151_936) for _ in range(LONG)]
    return dict(zip(responses.TOKEN_FIELDS, (ids[:1000], ids, [-rng.expovariate(3) for _ in ids]), strict=True))


TOKENS = bundle()


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("upstream", UPSTREAMS)
async def test_the_tokens_of_a_long_response_arrive(
    setup: ProxySetup, upstream: str, path: str, streamed: bool
) -> None:
    setup.policy.prepare(responses.build_message("word " * LONG) | TOKENS)
    async with httpx.AsyncClient(timeout=60) as client:
        answer = await client.post(f"{setup.urls[upstream]}/v1/{path}", json=BODIES[path] | {"stream": streamed})
    assert answer.status_code == 200, answer.text[:500]
    assert all(orjson.dumps(TOKENS[key]) in answer.content for key in responses.TOKEN_FIELDS)


@pytest.mark.parametrize("path", BODIES)
async def test_returned_tokens_are_sent_back_to_the_model(setup: ProxySetup, path: str) -> None:
    short = {key: TOKENS[key][:3] for key in responses.TOKEN_FIELDS}
    setup.policy.prepare(responses.build_message("42") | short)
    url = f"{setup.urls['vllm']}/v1/{path}"
    async with httpx.AsyncClient(timeout=60) as client:
        first = (await client.post(url, json=BODIES[path])).json()
        await client.post(url, json=BODIES[path] | continue_conversation(path, first))
    [*_, message, _] = setup.policy.requests[-1]["input"]
    assert {key: message[key] for key in responses.TOKEN_FIELDS} == short


def continue_conversation(path: str, answer: Item) -> Item:
    """Return the request that continues the conversation after *answer*."""
    asks = {"role": "user", "content": "go on"}
    if path == "responses":
        return {"input": [{"role": "user", "content": "hi"}, *answer["output"], asks]}
    reply = answer["choices"][0]["message"] if path == "chat/completions" else answer
    message = {"role": "assistant"} | {
        key: value for key, value in reply.items() if key in {"content", *responses.TOKEN_FIELDS}
    }
    return {"messages": [*BODIES[path]["messages"], message, asks]}
