"""Legacy completions: OpenAI's SDK asks the model server, which forwards the request to the engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import pytest_asyncio
from aiohttp import web
from openai import APIStatusError, AsyncOpenAI, BadRequestError

from gymsdk import testing
from gymsdk.responses import build_message
from gymsdk.servers import model as server
from gymsdk.types import Item, Model

from .app_helpers import serve_app
from .proxies import PreparedModel, ProxySetup, build_model, run_proxies, sdks

pytestmark = pytest.mark.asyncio(loop_scope="module")

UPSTREAMS = ("vllm", "endpoint-chat", "endpoint-responses", "openai-chat")
TEXT = "Once upon a time"
IDS = [*TEXT.encode()]
COMPLETION: Item = {
    "id": "cmpl-1",
    "object": "text_completion",
    "created": 1,
    "model": "m",
    "choices": [{"index": 0, "text": "yes", "finish_reason": "stop", "logprobs": None}],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def setup() -> AsyncIterator[ProxySetup]:
    """Yield the proxies that the tests of this module share."""
    async with run_proxies(UPSTREAMS) as running:
        running.policy.prepare(build_message("there was a king"))
        yield running


@asynccontextmanager
async def serve_engine(*answers: tuple[int, Item], **options: Any) -> AsyncIterator[tuple[AsyncOpenAI, list[Item]]]:
    """Yield a client of a model server, and the bodies that an engine with these *answers* in order receives."""
    bodies: list[Item] = []

    async def answer(request: web.Request) -> web.Response:
        assert request.path == "/v1/completions"
        bodies.append(await request.json())
        status, body = answers[min(len(bodies), len(answers)) - 1]
        return web.json_response(body, status=status)

    application = web.Application()
    application.router.add_post("/v1/{path:.*}", answer)
    async with testing.serve(application) as base:
        model: Model = build_model("vllm", base, wait=0.01, **options)
        async with serve_app(server.create_app(model)) as url, sdks(url) as (openai, _):
            yield openai, bodies


@pytest.mark.parametrize("upstream", UPSTREAMS)
@pytest.mark.parametrize("prompt", [TEXT, [TEXT], IDS, [IDS]])
async def test_a_prompt_is_completed(setup: ProxySetup, upstream: str, prompt: Any) -> None:
    completion = await setup.openai[upstream].completions.create(model="any", prompt=prompt, max_tokens=64)
    [choice] = completion.choices
    assert (choice.index, choice.text, choice.finish_reason) == (0, "there was a king", "stop")
    assert completion.object == "text_completion"
    assert completion.id
    assert completion.usage is not None
    assert completion.usage.prompt_tokens == len(IDS)
    assert completion.usage.total_tokens == completion.usage.prompt_tokens + completion.usage.completion_tokens


@pytest.mark.parametrize("prompt", [[TEXT, "Two"], [IDS, [50]]])
async def test_each_prompt_has_n_choices(setup: ProxySetup, prompt: Any) -> None:
    completion = await setup.openai["vllm"].completions.create(model="any", prompt=prompt, n=2, max_tokens=5)
    assert [(choice.index, choice.text, choice.finish_reason) for choice in completion.choices] == [
        (index, "there", "length") for index in range(4)
    ]
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 4 * 5


async def test_the_prompt_and_log_probabilities_are_returned_on_request(setup: ProxySetup) -> None:
    completion = await setup.openai["vllm"].completions.create(
        model="any", prompt="Once", echo=True, logprobs=1, max_tokens=5
    )
    [choice] = completion.choices
    assert choice.text == "Oncethere"
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == [*"Oncethere"]
    assert choice.logprobs.text_offset == [*range(9)]
    assert (choice.logprobs.token_logprobs or [0])[0] is None


@pytest.mark.parametrize("n", [1, 3])
async def test_a_stream_has_the_choices_with_their_indices(setup: ProxySetup, n: int) -> None:
    request: Any = {"model": "any", "prompt": TEXT, "n": n, "max_tokens": 64}
    whole = await setup.openai["vllm"].completions.create(**request)
    stream = await setup.openai["vllm"].completions.create(
        **request, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    texts = dict.fromkeys(range(n), "")
    ends = {}
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            ends[choice.index] = choice.finish_reason
    assert texts == {choice.index: choice.text for choice in whole.choices}
    assert ends == dict.fromkeys(range(n), "stop")
    assert len({chunk.id for chunk in chunks}) == 1
    assert [chunk.usage for chunk in chunks] == [*[None] * n, whole.usage]


async def test_the_engine_gets_the_keys_of_the_request() -> None:
    extra = {"suffix": "end", "best_of": 2, "echo": True, "logprobs": 0, "seed": 3, "stop": ["x"], "user": "me"}
    ignored = {"prompt_cache_key": "k", "tools": [], "unknown_key": 7}
    async with serve_engine((200, COMPLETION), pinned={"temperature": 0.5, "max_output_tokens": 9}) as (client, bodies):
        await client.completions.create(
            model="any", prompt=TEXT, temperature=2, max_tokens=5, stream=True, extra_body=extra | ignored
        )
        await client.completions.create(model="any", prompt="x", max_tokens=0, echo=True)
    pinned = {"model": "org/policy-1", "temperature": 0.5, "max_tokens": 9}
    assert bodies == [
        {"prompt": TEXT, "unknown_key": 7, **extra, **pinned},
        {"prompt": "x", "echo": True, **pinned},
    ]


async def test_the_additions_for_conversations_are_left_out() -> None:
    options: Any = {"tokens": True, "token_interface": "chat", "chat_template_kwargs": {"a": 1}, "extra_body": {"b": 2}}
    async with serve_engine((200, COMPLETION), **options) as (client, bodies):
        completion = await client.completions.create(model="any", prompt=IDS)
    assert completion.choices[0].text == "yes"
    assert bodies == [{"model": "org/policy-1", "prompt": IDS, "b": 2, "temperature": 1.0, "top_p": 1.0}]


@pytest.mark.parametrize(
    ("changes", "param", "message"),
    [
        ({"prompt": None}, "prompt", "'prompt' must be a text, a list of texts, a list of token ids, or"),
        ({"prompt": []}, "prompt", "'prompt' must be"),
        ({"prompt": {"text": "x"}}, "prompt", "'prompt' must be"),
        ({"prompt": ["x", 1]}, "prompt", "'prompt' must be"),
        ({"prompt": [[1], "x"]}, "prompt", "'prompt' must be"),
        ({"prompt": [[]]}, "prompt", "'prompt' must be"),
        ({"prompt": [True]}, "prompt", "'prompt' must be"),
        ({"n": 0}, "n", "'n' must be at least 1, got 0"),
        ({"n": "two"}, "n", "n must be an integer"),
        ({"best_of": 0}, "best_of", "'best_of' must be at least 1"),
        ({"stream_options": 1}, "stream_options", "stream_options must be an object"),
        ({"vllm_xargs": {"a": 1}}, "vllm_xargs", "'vllm_xargs' comes only from the configuration of the model"),
        ({"suffix": "end"}, "suffix", "suffix is not currently supported"),
        ({"max_tokens": -1}, "max_tokens", "max_tokens must be at least 1, got -1"),
        ({"prompt": [999999]}, "prompt", "token id 999999 is out of range"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_wrong_request_is_refused_with_the_parameter(
    setup: ProxySetup, changes: Item, param: str, message: str, stream: bool
) -> None:
    body = {"model": "any", "prompt": TEXT, "stream": stream} | changes
    async with httpx.AsyncClient(base_url=setup.urls["vllm"]) as client:
        response = await client.post("/v1/completions", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert message in error["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_that_is_too_long_is_an_error(stream: bool) -> None:
    app = testing.build_app(PreparedModel([build_message("x")]), faults=testing.Faults(context=20))
    async with (
        testing.serve(app) as base,
        serve_app(server.create_app(build_model("vllm", base))) as url,
        sdks(url) as (openai, _),
    ):
        with pytest.raises(BadRequestError, match="maximum context length is 20 tokens") as caught:
            await openai.completions.create(model="any", prompt="x" * 30, stream=stream)
        assert caught.value.code == "context_length_exceeded"
        # The limit does not fit beside the prompt, so that the engine gets the largest one that does.
        completion = await openai.completions.create(model="any", prompt="x" * 10, max_tokens=100)
        assert completion.choices[0].text == "x"


async def test_a_faulty_answer_is_asked_for_again() -> None:
    broken = (200, {"choices": [{"index": 0}]})
    aborted = (200, COMPLETION | {"choices": [{"index": 0, "text": "", "finish_reason": "abort"}]})
    async with serve_engine((503, {}), broken, aborted, (200, COMPLETION)) as (client, bodies):
        assert (await client.completions.create(model="any", prompt=TEXT)).choices[0].text == "yes"
    assert len(bodies) == 4


@pytest.mark.parametrize("status", [404, 405, 501])
async def test_an_engine_without_completions_is_reported(status: int) -> None:
    async with serve_engine((status, {"detail": "Not Found"})) as (client, bodies):
        with pytest.raises(APIStatusError, match="Not Found; the engine has no /v1/completions") as caught:
            await client.with_options(max_retries=2).completions.create(model="any", prompt=TEXT)
    assert (caught.value.status_code, caught.value.code, len(bodies)) == (501, "model_cannot_complete", 1)


async def test_an_unknown_model_is_no_missing_api() -> None:
    error = {"error": {"message": "The model `x` does not exist.", "type": "NotFoundError", "param": "model"}}
    async with serve_engine((404, error)) as (client, _):
        with pytest.raises(APIStatusError, match="The model `x` does not exist") as caught:
            await client.completions.create(model="any", prompt=TEXT)
    assert (caught.value.status_code, caught.value.code) == (502, "model_not_found")


async def test_a_scripted_model_has_no_completions() -> None:
    async with serve_app(server.create_app(PreparedModel())) as url, sdks(url) as (openai, _):
        with pytest.raises(APIStatusError, match="has no completions; send a chat completion") as caught:
            await openai.completions.create(model="any", prompt=TEXT)
    assert caught.value.status_code == 501


async def test_a_rollout_with_a_token_capture_gets_no_completions(setup: ProxySetup) -> None:
    async with httpx.AsyncClient(base_url=setup.urls["vllm"]) as client:
        body = {"model": "any", "prompt": TEXT}
        captured = await client.post("/ng-rollout/r1/training-token-capture/v1/completions", json=body)
        other = await client.post("/ng-rollout/r1/v1/completions", json=body)
    assert (captured.status_code, other.status_code) == (400, 200)
    assert "completions have no token capture" in captured.json()["error"]["message"]


async def test_a_pause_holds_completions(setup: ProxySetup) -> None:
    async with httpx.AsyncClient(base_url=setup.urls["vllm"]) as client:
        await client.post("/pause", json={})
        held = asyncio.ensure_future(client.post("/v1/completions", json={"model": "any", "prompt": TEXT}))
        while not (await client.get("/pause")).json()["waiting"]:
            assert not held.done()
            await asyncio.sleep(0.02)
        await client.post("/resume")
        assert (await held).status_code == 200


async def test_completions_go_to_another_replica_if_one_fails(setup: ProxySetup) -> None:
    model: Model = build_model("vllm", f"http://127.0.0.1:9/v1,{setup.upstream}", wait=0.01)
    async with serve_app(server.create_app(model)) as url, sdks(url) as (openai, _):
        for _ in range(3):
            completion = await openai.completions.create(model="any", prompt=TEXT, max_tokens=64)
            assert completion.choices[0].text == "there was a king"


async def test_the_policy_endpoint_completes_and_streams(setup: ProxySetup) -> None:
    client = setup.openai["vllm"].with_options(base_url=setup.upstream)
    request: Any = {"model": "any", "prompt": [TEXT, "Two"], "n": 2, "max_tokens": 5}
    whole = await client.completions.create(**request)
    stream = await client.completions.create(**request, stream=True)
    streamed = {choice.index: choice.text async for chunk in stream for choice in chunk.choices}
    assert streamed == {choice.index: choice.text for choice in whole.choices} == dict.fromkeys(range(4), "there")
