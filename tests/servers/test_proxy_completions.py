"""Legacy completions, completions with several choices and token counts: the model server asks the engine for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import pytest_asyncio
from aiohttp import web
from anthropic import APIStatusError as AnthropicStatusError
from anthropic import AsyncAnthropic
from anthropic import BadRequestError as AnthropicBadRequestError
from openai import APIStatusError, AsyncOpenAI, BadRequestError
from openai.types.chat import ChatCompletion
from openai.types.chat.chat_completion import Choice

from gymsdk import responses, testing
from gymsdk.errors import Failed
from gymsdk.responses import build_message, build_usage
from gymsdk.servers import model as server
from gymsdk.types import Episode, Item, Model

from .app_helpers import serve_app, serve_handler
from .engines import FixedModel
from .proxies import ADD, NAME, UPSTREAMS, PreparedModel, build_model, run_proxies, sdks

pytestmark = pytest.mark.asyncio(loop_scope="module")

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
async def setup():
    """Yield the proxies that the tests of this module share."""
    async with run_proxies() as running:
        yield running


@pytest.fixture(autouse=True)
def policy(setup):
    setup.policy.prepare(build_message("there was a king"))
    return setup.policy


@asynccontextmanager
async def serve_answers(answer: Any, upstream: str = "vllm", **options: Any) -> AsyncIterator[tuple[Any, Any]]:
    """Yield the SDKs as clients of a model server in front of an engine with this *answer*."""
    async with serve_handler(answer) as base:
        model: Model = build_model(upstream, f"{base}/v1", wait=0.01, **options)
        async with serve_app(server.create_app(model)) as url, sdks(url) as both:
            yield both


@asynccontextmanager
async def serve_engine(*answers: tuple[int, Item], **options: Any) -> AsyncIterator[tuple[AsyncOpenAI, list[Item]]]:
    """Yield a client of a model server, and the bodies that an engine with these *answers* in order receives."""
    bodies: list[Item] = []

    async def answer(request: web.Request) -> web.Response:
        assert request.path == "/v1/completions"
        bodies.append(await request.json())
        status, body = answers[min(len(bodies), len(answers)) - 1]
        return web.json_response(body, status=status)

    async with serve_answers(answer, **options) as (openai, _):
        yield openai, bodies


@asynccontextmanager
async def serve_model(model: Model) -> AsyncIterator[AsyncOpenAI]:
    async with serve_app(server.create_app(model)) as url, sdks(url) as (openai, _):
        yield openai


@pytest.mark.parametrize("upstream", ["vllm", "endpoint-chat", "endpoint-responses", "openai-chat"])
async def test_a_prompt_is_completed(setup, upstream):
    for prompt in (TEXT, [TEXT], IDS, [IDS]):
        completion = await setup.openai[upstream].completions.create(model="any", prompt=prompt, max_tokens=64)
        [choice] = completion.choices
        assert (choice.index, choice.text, choice.finish_reason) == (0, "there was a king", "stop")
        assert (completion.object, bool(completion.id)) == ("text_completion", True)
        usage = completion.usage
        assert usage.prompt_tokens == len(IDS)
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


async def test_each_prompt_has_n_choices(setup):
    for prompt in ([TEXT, "Two"], [IDS, [50]]):
        completion = await setup.openai["vllm"].completions.create(model="any", prompt=prompt, n=2, max_tokens=5)
        found = [(choice.index, choice.text, choice.finish_reason) for choice in completion.choices]
        assert found == [(index, "there", "length") for index in range(4)]
        assert completion.usage.completion_tokens == 4 * 5


async def test_the_prompt_and_log_probabilities_are_returned_on_request(setup):
    request = {"model": "any", "prompt": "Once", "echo": True, "logprobs": 1, "max_tokens": 5}
    [choice] = (await setup.openai["vllm"].completions.create(**request)).choices
    assert (choice.text, choice.logprobs.tokens) == ("Oncethere", [*"Oncethere"])
    assert (choice.logprobs.text_offset, choice.logprobs.token_logprobs[0]) == ([*range(9)], None)


@pytest.mark.parametrize("n", [1, 3])
async def test_a_stream_has_the_choices_with_their_indices(setup, n):
    request: Any = {"model": "any", "prompt": TEXT, "n": n, "max_tokens": 64}
    completions = setup.openai["vllm"].completions
    whole = await completions.create(**request)
    stream = await completions.create(**request, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    texts, ends = dict.fromkeys(range(n), ""), {}
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        texts[choice.index] += choice.text
        ends[choice.index] = choice.finish_reason
    assert texts == {choice.index: choice.text for choice in whole.choices}
    assert ends == dict.fromkeys(range(n), "stop")
    assert len({chunk.id for chunk in chunks}) == 1
    assert [chunk.usage for chunk in chunks] == [*[None] * n, whole.usage]


async def test_the_engine_gets_the_keys_of_the_request():
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


async def test_the_additions_for_conversations_are_left_out():
    options: Any = {"tokens": True, "token_interface": "chat", "chat_template_kwargs": {"a": 1}, "extra_body": {"b": 2}}
    async with serve_engine((200, COMPLETION), **options) as (client, bodies):
        completion = await client.completions.create(model="any", prompt=IDS)
    assert completion.choices[0].text == "yes"
    assert bodies == [{"model": "org/policy-1", "prompt": IDS, "b": 2, "temperature": 1.0, "top_p": 1.0}]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_wrong_request_is_refused_with_the_parameter(setup, stream):
    prompts = ([], {"text": "x"}, ["x", 1], [[1], "x"], [[]], [True])
    cases = [({"prompt": prompt}, "prompt", "'prompt' must be") for prompt in prompts]
    texts = "'prompt' must be a text, a list of texts, a list of token ids, or"
    async with httpx.AsyncClient(base_url=setup.urls["vllm"]) as client:
        for changes, param, message in (
            *cases,
            ({"prompt": None}, "prompt", texts),
            ({"n": 0}, "n", "'n' must be at least 1, got 0"),
            ({"n": "two"}, "n", "n must be an integer"),
            ({"best_of": 0}, "best_of", "'best_of' must be at least 1"),
            ({"stream_options": 1}, "stream_options", "stream_options must be an object"),
            ({"vllm_xargs": {"a": 1}}, "vllm_xargs", "'vllm_xargs' comes only from the configuration of the model"),
            ({"suffix": "end"}, "suffix", "suffix is not currently supported"),
            ({"max_tokens": -1}, "max_tokens", "max_tokens must be at least 1, got -1"),
            ({"prompt": [999999]}, "prompt", "token id 999999 is out of range"),
        ):
            body = {"model": "any", "prompt": TEXT, "stream": stream} | changes
            response = await client.post("/v1/completions", json=body)
            error = response.json()["error"]
            assert (response.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
            assert message in error["message"], changes


async def test_a_prompt_that_is_too_long_is_an_error():
    app = testing.build_app(PreparedModel([build_message("x")]), faults=testing.Faults(context=20))
    async with testing.serve(app) as base, serve_model(build_model("vllm", base)) as openai:
        for stream in (False, True):
            with pytest.raises(BadRequestError, match="maximum context length is 20 tokens") as caught:
                await openai.completions.create(model="any", prompt="x" * 30, stream=stream)
            assert caught.value.code == "context_length_exceeded"
        # The limit does not fit beside the prompt, so that the engine gets the largest one that does.
        completion = await openai.completions.create(model="any", prompt="x" * 10, max_tokens=100)
        assert completion.choices[0].text == "x"


async def test_a_faulty_answer_is_asked_for_again():
    broken = (200, {"choices": [{"index": 0}]})
    aborted = (200, COMPLETION | {"choices": [{"index": 0, "text": "", "finish_reason": "abort"}]})
    async with serve_engine((503, {}), broken, aborted, (200, COMPLETION)) as (client, bodies):
        assert (await client.completions.create(model="any", prompt=TEXT)).choices[0].text == "yes"
    assert len(bodies) == 4


@pytest.mark.parametrize("status", [404, 405, 501])
async def test_an_engine_without_completions_is_reported(status):
    async with serve_engine((status, {"detail": "Not Found"})) as (client, bodies):
        with pytest.raises(APIStatusError, match="Not Found; the engine has no /v1/completions") as caught:
            await client.with_options(max_retries=2).completions.create(model="any", prompt=TEXT)
    assert (caught.value.status_code, caught.value.code, len(bodies)) == (501, "model_cannot_complete", 1)


async def test_an_unknown_model_is_no_missing_api_and_a_scripted_model_has_no_completions():
    error = {"error": {"message": "The model `x` does not exist.", "type": "NotFoundError", "param": "model"}}
    async with serve_engine((404, error)) as (client, _):
        with pytest.raises(APIStatusError, match="The model `x` does not exist") as caught:
            await client.completions.create(model="any", prompt=TEXT)
    assert (caught.value.status_code, caught.value.code) == (502, "model_not_found")
    async with serve_model(PreparedModel()) as openai:
        with pytest.raises(APIStatusError, match="has no completions; send a chat completion") as caught:
            await openai.completions.create(model="any", prompt=TEXT)
    assert caught.value.status_code == 501


async def test_a_rollout_with_a_token_capture_gets_no_completions(setup):
    async with httpx.AsyncClient(base_url=setup.urls["vllm"]) as client:
        body = {"model": "any", "prompt": TEXT}
        captured = await client.post("/ng-rollout/r1/training-token-capture/v1/completions", json=body)
        other = await client.post("/ng-rollout/r1/v1/completions", json=body)
    assert (captured.status_code, other.status_code) == (400, 200)
    assert "completions have no token capture" in captured.json()["error"]["message"]


async def test_a_pause_holds_completions_but_no_count(setup):
    async with httpx.AsyncClient(base_url=setup.urls["vllm"]) as client:
        await client.post("/pause", json={})
        assert (await setup.openai["vllm"].responses.input_tokens.count(**INPUT)).input_tokens
        held = asyncio.ensure_future(client.post("/v1/completions", json={"model": "any", "prompt": TEXT}))
        while not (await client.get("/pause")).json()["waiting"]:
            assert not held.done()
            await asyncio.sleep(0.02)
        await client.post("/resume")
        assert (await held).status_code == 200


async def test_completions_go_to_another_replica_if_one_fails(setup):
    async with serve_model(build_model("vllm", f"http://127.0.0.1:9/v1,{setup.upstream}", wait=0.01)) as openai:
        for _ in range(3):
            completion = await openai.completions.create(model="any", prompt=TEXT, max_tokens=64)
            assert completion.choices[0].text == "there was a king"


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
            [build_message(f"answer {number}")], model=self.name, usage=usage, request=request
        )


async def assemble_stream(client: Any, **request: Any) -> ChatCompletion:
    """Return the completion that OpenAI's SDK assembles from a stream."""
    async with client.chat.completions.stream(**request, stream_options={"include_usage": True}) as stream:
        await stream.until_done()
        return stream.current_completion_snapshot


def describe_choice(choice: Choice) -> tuple[object, ...]:
    calls = [call.id for call in choice.message.tool_calls or []]
    return choice.index, choice.finish_reason, choice.message.content, calls


@pytest.mark.parametrize("upstream", UPSTREAMS)
async def test_a_client_gets_n_choices(setup, policy, upstream):
    policy.prepare(responses.build_reasoning("a sum"), build_message("42"), CALL)
    completion = await setup.openai[upstream].chat.completions.create(**REQUEST, n=3)
    assert [choice.index for choice in completion.choices] == [0, 1, 2]
    assert len(policy.requests) == 3
    for choice in completion.choices:
        assert (choice.message.content, choice.finish_reason) == ("42", "tool_calls")
        assert [call.function.name for call in choice.message.tool_calls or []] == ["add"]


async def test_a_stream_has_the_same_choices():
    async with serve_model(FixedModel(build_message("42"), CALL)) as openai:
        for n in (None, 1, 2, 128):
            request = REQUEST | ({} if n is None else {"n": n})
            whole = await openai.chat.completions.create(**request)
            streamed = await assemble_stream(openai, **request)
            assert len(whole.choices) == (n or 1)
            assert [*map(describe_choice, whole.choices)] == [*map(describe_choice, streamed.choices)]
            assert streamed.usage == whole.usage


@pytest.mark.parametrize(("seed", "seeds"), [(7, [7, 8, 9]), (None, [None] * 3)])
async def test_the_usage_counts_the_prompt_once_and_each_choice_has_its_own_seed(seed, seeds):
    model = NumberedModel()
    async with serve_model(model) as openai:
        completion = await openai.chat.completions.create(**REQUEST, n=3, seed=seed)
    usage = completion.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (3, 6, 9)
    assert usage.completion_tokens_details.reasoning_tokens == 6
    assert sorted(str(choice.message.content) for choice in completion.choices) == [f"answer {n}" for n in (1, 2, 3)]
    assert model.seeds == seeds


async def test_a_wrong_n_is_refused(setup):
    cases = [(n, f"'n' must be an integer from 1 to 128, got {n}") for n in (0, -1, 129)]
    cases += [(n, "n must be an integer") for n in ("3", True, [1], 2.0)]
    async with httpx.AsyncClient(base_url=setup.urls["vllm"]) as client:
        for stream in (False, True):
            for n, message in cases:
                response = await client.post("/v1/chat/completions", json=REQUEST | {"n": n, "stream": stream})
                error = response.json()["error"]
                assert (response.status_code, error["type"], error["param"]) == (400, "invalid_request_error", "n"), n
                assert message in error["message"]
        # Other APIs have no `n`.
        response = await client.post("/v1/responses", json={"input": "hi", "n": 2})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "n")


async def test_a_failed_choice_fails_the_completion_and_cancels_the_others():
    model = NumberedModel(fails_at=2)
    async with serve_model(model) as openai:
        with pytest.raises(APIStatusError, match="the engine is full") as caught:
            await openai.chat.completions.create(**REQUEST, n=3)
        assert (caught.value.status_code, caught.value.response.headers["retry-after"]) == (429, "7")
    assert model.ended == [1, 3]


async def test_with_token_ids_or_a_token_capture_there_is_one_choice(setup):
    url = f"{setup.urls['vllm']}/ng-rollout/r1/training-token-capture/v1"
    async with (
        testing.serve(testing.build_app(FixedModel())) as base,
        serve_model(build_model("vllm", base, tokens=True)) as openai,
    ):
        for client in (openai, setup.openai["vllm"].with_options(base_url=url)):
            with pytest.raises(BadRequestError, match="'n' must be 1 with token ids") as caught:
                await client.chat.completions.create(**REQUEST, n=2)
            assert caught.value.param == "n"
        assert len((await openai.chat.completions.create(**REQUEST, n=1)).choices) == 1


async def test_an_engine_returns_the_ids_of_each_choice_on_request(setup):
    request = REQUEST | {"n": 2, "logprobs": True, "extra_body": {"return_token_ids": True}}
    completion = await setup.openai["vllm"].chat.completions.create(**request)
    one, other = [choice.model_extra["token_ids"] for choice in completion.choices]
    assert one == other != []
    assert completion.model_extra["prompt_token_ids"]


COUNTING = ("vllm", "endpoint-chat", "endpoint-responses")
TOOL = {"name": "add", "description": "Add."}
COUNTED: dict[str, Any] = REQUEST | {"system": "Be brief.", "tools": [TOOL | {"input_schema": ADD}]}
FUNCTION = TOOL | {"type": "function", "parameters": ADD, "strict": True}
INPUT: dict[str, Any] = {"model": "any", "instructions": "Be brief.", "input": "40 + 2?", "tools": [FUNCTION]}


async def expect_rejection(anthropic: AsyncAnthropic) -> None:
    with pytest.raises(AnthropicStatusError, match="cannot count tokens; read the usage") as caught:
        await anthropic.messages.count_tokens(**COUNTED)
    assert (caught.value.status_code, caught.value.body["error"]["type"]) == (501, "api_error")


@pytest.mark.slow
@pytest.mark.parametrize("upstream", COUNTING)
async def test_the_engine_counts(setup, upstream):
    counted = await setup.anthropic[upstream].messages.count_tokens(**COUNTED)
    async with AsyncAnthropic(base_url=setup.upstream.removesuffix("/v1"), api_key="x") as engine:
        assert counted == await engine.messages.count_tokens(**COUNTED)
    assert counted.input_tokens > len("Be brief.40 + 2?")


async def test_hosted_models_and_scripted_policies_do_not_count(setup):
    with pytest.raises(AnthropicBadRequestError, match="messages must have at least one message"):
        await setup.anthropic["vllm"].messages.count_tokens(model="any", messages=[])
    await expect_rejection(setup.anthropic["openai-chat"])
    async with serve_app(server.create_app(PreparedModel())) as url, sdks(url) as (_, anthropic):
        await expect_rejection(anthropic)


@pytest.mark.parametrize("upstream", [*COUNTING, "openai-chat"])
async def test_openais_sdk_counts_the_input(setup, upstream):
    counted = await setup.openai[upstream].responses.input_tokens.count(**INPUT)
    engine = setup.openai[upstream].with_options(base_url=setup.upstream)
    assert counted.object == "response.input_tokens"
    assert counted == await engine.responses.input_tokens.count(**INPUT)
    items: Any = [{"role": "user", "content": "4"}]
    shorter = await setup.openai[upstream].responses.input_tokens.count(model="any", input=items)
    assert 0 < shorter.input_tokens < counted.input_tokens


async def test_an_invalid_count_is_rejected_in_openais_form(setup):
    # Instructions alone are an input.
    assert (await setup.openai["vllm"].responses.input_tokens.count(instructions="Be brief.")).input_tokens
    async with httpx.AsyncClient(base_url=setup.urls["vllm"]) as client:
        for body, param in (
            ({}, "input"),
            ({"input": 7}, "input"),
            ({"input": [7]}, "input"),
            ({"input": "hi", "tools": 3}, "tools"),
            ({"input": "hi", "previous_response_id": "resp_1"}, "previous_response_id"),
            ({"input": "hi", "conversation": "conv_1"}, "conversation"),
            ({"input": "hi", "stream": True, "tools": 3}, "tools"),
        ):
            response = await client.post("/v1/responses/input_tokens", json=body)
            error = response.json()["error"]
            assert (response.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param), body


@pytest.mark.parametrize("upstream", ["endpoint-chat", "endpoint-responses", "openai-responses"])
@pytest.mark.parametrize("has_own", [False, True])
async def test_an_engine_is_asked_for_its_own_count(upstream, has_own):
    bodies: dict[str, dict[str, Any]] = {}

    async def answer(request: web.Request) -> web.StreamResponse:
        bodies[request.path] = await request.json()
        if has_own and request.path == "/v1/responses/input_tokens":
            return web.json_response({"object": "response.input_tokens", "input_tokens": 7})
        # llama.cpp's tokenize endpoint accepts no messages, and returns no tokens.
        return web.json_response({"tokens": []}, status=200 if request.path == "/tokenize" else 404)

    async with serve_answers(answer, upstream, extra_body={"top_k": 1}, pinned={"temperature": 1.0}) as (openai, _):
        if has_own:
            assert (await openai.responses.input_tokens.count(**INPUT)).input_tokens == 7
        else:
            with pytest.raises(APIStatusError, match="cannot count tokens; read the usage") as caught:
                await openai.with_options(max_retries=2).responses.input_tokens.count(**INPUT)
            assert (caught.value.status_code, caught.value.code) == (501, "model_cannot_count")
    asked = {"/v1/responses/input_tokens"} | (set() if upstream == "openai-responses" else {"/tokenize"})
    assert bodies.keys() == (asked if not has_own or upstream == "endpoint-chat" else {"/v1/responses/input_tokens"})
    assert bodies["/v1/responses/input_tokens"] == INPUT | {"model": NAME}
