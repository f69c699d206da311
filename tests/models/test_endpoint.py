"""The HTTP models against a real policy server on loopback, in both APIs."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import chain, repeat

import pytest
from aiohttp import web

from gymsdk import model
from gymsdk import responses as wire
from gymsdk.errors import Failed
from gymsdk.responses import Api, build_usage
from gymsdk.testing.endpoint import build_app, serve
from gymsdk.testing.faults import NO_FAULT, Faults
from gymsdk.types import Episode, Item, Model

CALL = wire.build_function_call("add", '{"a":1}', "c1")
OTHER_CALL = wire.build_function_call("add", '{"a":2}', "c2")
TOOL = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}, "strict": False}
QUICK = {"wait": 0.001, "api_key": "sk-x"}
BOTH = pytest.mark.parametrize("api", ["chat", "responses"])
PROVIDERS = pytest.mark.parametrize("provider", ["endpoint", "vllm", "openai"])


class FixedModel:
    """A model that returns the same items for every request and records the requests."""

    def __init__(self, *output: Item) -> None:
        self.output = list(output) or [wire.build_message("hello")]
        self.requests: list[Item] = []

    async def respond(self, request: Item, *, episode: Episode | None = None) -> Item:
        self.requests.append(request)
        return wire.build_response(self.output, model="replies", usage=build_usage(3, 4), request=request)


@asynccontextmanager
async def serve_model(
    policy: Model, name: str = "endpoint/stub", faults: Faults = NO_FAULT, **options: object
) -> AsyncIterator[Model]:
    async with serve(build_app(policy, name="stub", faults=faults)) as url:
        yield model(name, base_url=url, **(QUICK | options))


@asynccontextmanager
async def serve_answers(*answers: tuple[int, object]) -> AsyncIterator[tuple[str, list[Item]]]:
    """Serve these answers in turn, then the last one for every request; yield the URL and the request bodies."""
    script, bodies = chain(answers, repeat(answers[-1])), []

    async def handle(request: web.Request) -> web.StreamResponse:
        bodies.append(await request.json() | {"key": request.headers.get("Authorization")})
        status, body = next(script)
        return web.json_response(body, status=status)

    application = web.Application()
    application.router.add_post("/{path:.*}", handle)
    async with serve(application) as url:
        yield url, bodies


def completion(message: Item) -> Item:
    return {"model": "m", "choices": [{"message": message, "finish_reason": "stop"}]}


def types(response: Item) -> list[str]:
    return [item["type"] for item in response["output"]]


@BOTH
@PROVIDERS
async def test_a_whole_conversation_reaches_the_policy_and_its_turn_comes_back(provider: str, api: Api) -> None:
    earlier = [wire.build_reasoning("hmm"), wire.build_message("I add."), CALL]
    history = [{"role": "user", "content": "hi"}, *earlier, wire.build_function_call_output("c1", "3")]
    recorder = FixedModel(*earlier, OTHER_CALL)
    async with serve_model(recorder, f"{provider}/stub", api=api) as policy:
        response = await policy.respond({"input": history, "tools": [TOOL], "temperature": 0.5})
    assert response.keys() >= wire.build_response([], model="").keys()
    assert (response["model"], response["status"], response["temperature"]) == ("stub", "completed", 0.5)
    assert (response["usage"]["input_tokens"], response["usage"]["total_tokens"]) == (3, 7)
    assert types(response) == ["reasoning", "message", "function_call", "function_call"]
    assert response["output"][1]["content"][0]["text"] == "I add."
    calls = [(item["call_id"], item["arguments"]) for item in response["output"][2:]]
    assert calls == [("c1", '{"a":1}'), ("c2", '{"a":2}')]
    [request] = recorder.requests
    kinds = [item.get("type", item.get("role")) for item in request["input"]]
    # A hosted model accepts no reasoning of another model.
    reasoning = [] if provider == "openai" else ["reasoning"]
    assert kinds == ["user", *reasoning, "message", "function_call", "function_call_output"]
    assert request["tools"] == [TOOL]


@pytest.mark.slow
@BOTH
async def test_errors_and_dropped_connections_are_retried(api: Api) -> None:
    faults = Faults(errors=0.3, cuts=0.3, seed=1)
    async with serve_model(FixedModel(), faults=faults, api=api, retries=20) as policy, asyncio.TaskGroup() as group:
        calls = [group.create_task(policy.respond({"input": "hi"})) for _ in range(50)]
    assert all(types(call.result()) == ["message"] for call in calls)


@PROVIDERS
@pytest.mark.parametrize(
    ("faults", "options", "kind", "message"),
    [
        (Faults(errors=1), {"retries": 1}, "model_error", r"127\.0\.0\.1"),
        (Faults(cuts=1), {"retries": 1}, "model_unreachable", r"127\.0\.0\.1"),
        # The time includes that of the retries.
        (Faults(latency=10), {"retries": 50, "timeout": 0.05}, "model_timeout", r"within 0\.05 s"),
    ],
)
async def test_a_model_that_keeps_failing_or_is_slow_is_a_retryable_failure(
    provider: str, faults: Faults, options: dict[str, object], kind: str, message: str
) -> None:
    async with serve_model(FixedModel(), f"{provider}/stub", faults, **options) as policy:
        with pytest.raises(Failed, match=message) as caught:
            await policy.respond({"input": "hi"})
    assert (caught.value.kind, caught.value.retryable) == (kind, True)


@BOTH
@PROVIDERS
async def test_a_prompt_that_exceeds_the_context_gives_an_incomplete_response(provider: str, api: Api) -> None:
    message = "The input (61709 tokens) is longer than the model's context length (40960 tokens)."
    async with serve_answers((400, {"error": {"message": message}})) as (url, bodies):
        response = await model(f"{provider}/m", base_url=url, api_key="k", api=api).respond({"input": "hi"})
    assert (response["status"], response["output"], len(bodies)) == ("incomplete", [], 1)
    assert response["incomplete_details"]["reason"] == "max_output_tokens"
    assert message[:20] in response["incomplete_details"]["message"]


@BOTH
async def test_a_request_for_no_tokens_is_refused_and_no_full_context(api: Api) -> None:
    message = "max_tokens must be at least 1, got -1. (parameter=max_tokens, value=-1)"
    async with serve_answers((400, {"error": {"message": message}})) as (url, bodies):
        for limit, count in ((0, 0), (-1, 1)):
            with pytest.raises(Failed, match="must be at least 1") as caught:
                await model("vllm/m", base_url=url, api=api).respond({"input": "hi", "max_output_tokens": limit})
            assert (caught.value.kind, len(bodies)) == ("model_bad_request", count)


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (400, "Unsupported parameter: 'max_tokens' is not supported with this model."),
        (400, "This model's maximum context length is 4096 tokens. However, you requested 5000 output tokens"),
        (500, "maximum context length"),
    ],
)
async def test_another_rejection_is_not_mistaken_for_an_overflow(status: int, message: str) -> None:
    async with serve_answers((status, {"error": {"message": message}})) as (url, _):
        with pytest.raises(Failed, match="max"):
            await model("endpoint/m", base_url=url, retries=0).respond({"input": "hi"})


async def test_a_context_overflow_of_llama_server_is_detected_with_any_status() -> None:
    error = {"code": 500, "message": "Context size has been exceeded.", "type": "exceed_context_size_error"}
    async with serve_answers((500, {"error": error})) as (url, bodies):
        response = await model("endpoint/m", base_url=url).respond({"input": "hi"})
    assert (response["status"], len(bodies)) == ("incomplete", 1)


@PROVIDERS
async def test_a_rejection_that_repeats_the_prompt_is_not_mistaken_for_an_overflow(provider: str) -> None:
    prompt = "What is a context window?"
    detail = [{"type": "missing", "loc": ["body", "tools"], "msg": "Field required", "input": {"prompt": prompt}}]
    async with serve_answers((422, {"detail": detail})) as (url, _):
        with pytest.raises(Failed, match="answered 422") as caught:
            await model(f"{provider}/m", base_url=url, api_key="k").respond({"input": prompt})
    assert (caught.value.kind, caught.value.retryable) == ("model_refused", False)


async def test_a_rate_limit_returns_retry_after() -> None:
    async def handle(_: web.Request) -> web.StreamResponse:
        return web.json_response({}, status=429, headers={"Retry-After": "3600"})

    application = web.Application()
    application.router.add_post("/{path:.*}", handle)
    async with serve(application) as url:
        for name in ("endpoint/m", "openai/m"):
            with pytest.raises(Failed) as caught:
                await model(name, base_url=url, timeout=60, api_key="k", retries=0).respond({"input": "hi"})
            assert (caught.value.kind, caught.value.retry_after) == ("model_rate_limited", 3600.0)


async def test_a_rejection_is_final_and_gives_the_reason() -> None:
    async with serve_answers((404, {"error": {"message": "no model 'm'"}})) as (url, bodies):
        with pytest.raises(Failed, match=r"answered 404: .*no model 'm'.*check the base URL") as caught:
            await model("endpoint/m", base_url=url).respond({"input": "hi"})
    assert (caught.value.kind, caught.value.retryable, len(bodies)) == ("model_not_found", False, 1)


@pytest.mark.parametrize(
    ("name", "request_", "sent"),
    [
        ("endpoint/a/b", {"temperature": None}, {"model": "a/b"}),
        ("vllm/Qwen/Qwen3-4B", {"top_p": 0.9, "temperature": None}, {"model": "Qwen/Qwen3-4B", "top_p": 0.9}),
        ("vllm/m", {"top_logprobs": None}, {"model": "m"}),
        ("vllm/m", {"top_logprobs": 0}, {"model": "m", "top_logprobs": 0}),
        (
            "vllm/m",
            {"metadata": {"extra_body": '{"top_k": 20, "return_token_ids": true}'}},
            {"model": "m", "top_k": 20, "return_token_ids": True},
        ),
    ],
)
async def test_a_body_has_only_the_fields_of_the_request_and_no_key(name: str, request_: Item, sent: Item) -> None:
    request = {"input": "hi"} | request_
    before = copy.deepcopy(request)
    async with serve_answers((200, completion({"content": "x"}))) as (url, bodies):
        await model(name, base_url=url).respond(request)
    assert request == before
    assert bodies[0].pop("key") is None
    assert {key: value for key, value in bodies[0].items() if key != "messages"} == sent


async def test_reasoning_is_sent_back_in_the_configured_form() -> None:
    async with serve_answers((200, completion({"content": "x"}))) as (url, bodies):
        policy = model("endpoint/m", base_url=url, thoughts="tags")
        await policy.respond({"input": [wire.build_reasoning("hmm"), wire.build_message("4")]})
    assert bodies[0]["messages"] == [{"role": "assistant", "content": "<think>\nhmm\n</think>\n\n4"}]


async def test_two_hundred_concurrent_calls_succeed() -> None:
    async with serve_model(FixedModel(), faults=Faults(latency=0.05)) as policy, asyncio.TaskGroup() as group:
        calls = [group.create_task(policy.respond({"input": "hi"})) for _ in range(200)]
    assert len({call.result()["id"] for call in calls}) == 200


def test_a_model_works_in_several_event_loops() -> None:
    built: list[Model] = []

    async def run(port: int) -> int:
        async with serve(build_app(FixedModel()), port=port) as url:
            built[:] = built or [model("vllm/stub", base_url=url, **QUICK)]
            assert (await built[0].respond({"input": "hi"}))["status"] == "completed"
        return int(url.split(":")[2].partition("/")[0])

    asyncio.run(run(asyncio.run(run(0))))


async def test_sampling_in_extra_body_is_not_overridden() -> None:
    async with serve_answers((200, completion({"content": "4"}))) as (url, bodies):
        policy = model("vllm/m", base_url=url, extra_body={"temperature": 0.3})
        first = await policy.respond({"input": "hi", "top_p": 0.5})
        await policy.respond({"input": "hi", "metadata": {"extra_body": '{"temperature": 0.7}'}})
    assert [(body["temperature"], body.get("top_p")) for body in bodies] == [(0.3, 0.5), (0.7, None)]
    assert (first.get("temperature"), first["top_p"]) == (None, 0.5)


async def test_half_a_surrogate_pair_is_read() -> None:
    async with serve_answers((200, completion({"role": "assistant", "content": "a\ud83d b"}))) as (url, _):
        response = await model("endpoint/m", base_url=url).respond({"input": "hi"})
    assert response["output"][0]["content"][0]["text"] == "a\ud83d b"
