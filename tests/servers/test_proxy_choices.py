"""Chat completions with several choices: OpenAI's SDK asks the model server for `n` of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from openai import APIStatusError, BadRequestError
from openai.types.chat import ChatCompletion
from openai.types.chat.chat_completion import Choice

from gymsdk import responses, testing
from gymsdk.errors import Failed
from gymsdk.responses import build_usage
from gymsdk.servers import model as server
from gymsdk.types import Episode, Item, Model

from .app_helpers import serve_app
from .engines import FixedModel
from .proxies import UPSTREAMS, ProxySetup, build_model, run_proxies, sdks

pytestmark = pytest.mark.asyncio(loop_scope="module")

REQUEST: dict[str, Any] = {"model": "any", "messages": [{"role": "user", "content": "40 + 2?"}]}
CALL = responses.build_function_call("add", '{"a": 40}', "c1")


class NumberedModel:
    """A model that numbers its answers, and records the seeds of its requests.

    If one of its calls fails, the others take a minute.
    """

    name = "numbered"

    def __init__(self, *, fails_at: int | None = None) -> None:
        self.seeds: list[object] = []
        self.fails_at = fails_at
        self.ended: list[int] = []

    async def respond(self, request: Item, *, episode: Episode | None = None) -> Item:
        self.seeds.append(request.get("seed"))
        number = len(self.seeds)
        if self.fails_at is not None and number != self.fails_at:
            try:
                await asyncio.sleep(60)
            finally:
                self.ended.append(number)
        if number == self.fails_at:
            raise Failed("the engine is full", kind="model_rate_limited", retryable=True, retry_after=7)
        usage = build_usage(3, number, cached_tokens=1, reasoning_tokens=number)
        return responses.build_response(
            [responses.build_message(f"answer {number}")], model=self.name, usage=usage, request=request
        )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def setup() -> AsyncIterator[ProxySetup]:
    """Yield the proxies that the tests of this module share."""
    async with run_proxies() as running:
        running.policy.prepare(responses.build_reasoning("a sum"), responses.build_message("42"), CALL)
        yield running


async def assemble_stream(client: Any, **request: Any) -> ChatCompletion:
    """Return the completion that OpenAI's SDK assembles from a stream."""
    async with client.chat.completions.stream(**request, stream_options={"include_usage": True}) as stream:
        await stream.until_done()
        final: ChatCompletion = stream.current_completion_snapshot
        return final


def describe_choice(choice: Choice) -> tuple[object, ...]:
    calls = [call.id for call in choice.message.tool_calls or []]
    return choice.index, choice.finish_reason, choice.message.content, calls


@pytest.mark.parametrize("upstream", UPSTREAMS)
async def test_a_client_gets_n_choices(setup: ProxySetup, upstream: str) -> None:
    setup.policy.requests.clear()
    completion = await setup.openai[upstream].chat.completions.create(**REQUEST, n=3)
    assert [choice.index for choice in completion.choices] == [0, 1, 2]
    assert len(setup.policy.requests) == 3
    for choice in completion.choices:
        assert (choice.message.content, choice.finish_reason) == ("42", "tool_calls")
        assert [call.function.name for call in choice.message.tool_calls or []] == ["add"]  # type: ignore[union-attr]  # a function


@pytest.mark.parametrize("n", [None, 1, 2, 128])
async def test_a_stream_has_the_same_choices(n: int | None) -> None:
    request = REQUEST | ({} if n is None else {"n": n})
    async with serve_app(server.create_app(FixedModel(responses.build_message("42"), CALL))) as url, sdks(url) as both:
        whole = await both[0].chat.completions.create(**request)
        streamed = await assemble_stream(both[0], **request)
    assert len(whole.choices) == (n or 1)
    for one, other in zip(whole.choices, streamed.choices, strict=True):
        assert describe_choice(one) == describe_choice(other)
    assert streamed.usage == whole.usage


async def test_the_usage_counts_the_prompt_once() -> None:
    async with serve_app(server.create_app(NumberedModel())) as url, sdks(url) as (openai, _):
        completion = await openai.chat.completions.create(**REQUEST, n=3)
    usage = completion.usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (3, 6, 9)
    assert usage.completion_tokens_details is not None
    assert usage.completion_tokens_details.reasoning_tokens == 6
    assert sorted(str(choice.message.content) for choice in completion.choices) == [f"answer {n}" for n in (1, 2, 3)]


@pytest.mark.parametrize(("seed", "seeds"), [(7, [7, 8, 9]), (None, [None] * 3)])
async def test_each_choice_has_its_own_seed(seed: int | None, seeds: list[int | None]) -> None:
    model = NumberedModel()
    async with serve_app(server.create_app(model)) as url, sdks(url) as (openai, _):
        await openai.chat.completions.create(**REQUEST, n=3, seed=seed)
    assert model.seeds == seeds


@pytest.mark.parametrize(
    ("n", "message"),
    [
        (0, "'n' must be an integer from 1 to 128, got 0"),
        (-1, "'n' must be an integer from 1 to 128, got -1"),
        (129, "'n' must be an integer from 1 to 128, got 129"),
        ("3", "n must be an integer"),
        (True, "n must be an integer"),
        ([1], "n must be an integer"),
        (2.0, "n must be an integer"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_wrong_n_is_refused(setup: ProxySetup, n: object, message: str, stream: bool) -> None:
    async with httpx.AsyncClient(base_url=setup.urls["vllm"]) as client:
        response = await client.post("/v1/chat/completions", json=REQUEST | {"n": n, "stream": stream})
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["param"]) == (400, "invalid_request_error", "n")
    assert message in error["message"]


async def test_a_failed_choice_fails_the_completion_and_cancels_the_others() -> None:
    model = NumberedModel(fails_at=2)
    async with serve_app(server.create_app(model)) as url, sdks(url) as (openai, _):
        with pytest.raises(APIStatusError, match="the engine is full") as caught:
            await openai.chat.completions.create(**REQUEST, n=3)
        assert (caught.value.status_code, caught.value.response.headers["retry-after"]) == (429, "7")
    assert model.ended == [1, 3]


async def test_with_token_ids_there_is_one_choice() -> None:
    async with testing.serve(testing.build_app(FixedModel())) as base:
        model: Model = build_model("vllm", base, tokens=True)
        async with serve_app(server.create_app(model)) as url, sdks(url) as (openai, _):
            with pytest.raises(BadRequestError, match="'n' must be 1 with token ids") as caught:
                await openai.chat.completions.create(**REQUEST, n=2)
            assert caught.value.param == "n"
            assert len((await openai.chat.completions.create(**REQUEST, n=1)).choices) == 1


async def test_a_rollout_with_a_token_capture_has_one_choice(setup: ProxySetup) -> None:
    url = f"{setup.urls['vllm']}/ng-rollout/r1/training-token-capture/v1"
    with pytest.raises(BadRequestError, match="'n' must be 1 with token ids"):
        await setup.openai["vllm"].with_options(base_url=url).chat.completions.create(**REQUEST, n=2)


async def test_an_engine_returns_the_ids_of_each_choice_on_request(setup: ProxySetup) -> None:
    completion = await setup.openai["vllm"].chat.completions.create(
        **REQUEST, n=2, logprobs=True, extra_body={"return_token_ids": True}
    )
    ids: list[Any] = [choice.model_extra["token_ids"] for choice in completion.choices]  # type: ignore[index]  # vLLM's
    assert ids[0] == ids[1] != []
    assert completion.model_extra
    assert completion.model_extra["prompt_token_ids"]


async def test_other_apis_have_no_n(setup: ProxySetup) -> None:
    async with httpx.AsyncClient(base_url=setup.urls["vllm"]) as client:
        response = await client.post("/v1/responses", json={"input": "hi", "n": 2})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "n"


@pytest.mark.parametrize("stream", [False, True])
async def test_the_policy_endpoint_returns_n_choices(setup: ProxySetup, stream: bool) -> None:
    client = setup.openai["vllm"].with_options(base_url=setup.upstream)
    completion = await (
        assemble_stream(client, **REQUEST, n=3) if stream else client.chat.completions.create(**REQUEST, n=3)
    )
    assert [(choice.index, choice.message.content) for choice in completion.choices] == [(n, "42") for n in range(3)]
