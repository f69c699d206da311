"""Errors with status 200 of faulty proxies and routers: error objects, web pages and broken bodies."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from gymsdk import model
from gymsdk.errors import Failed
from gymsdk.responses import Api, build_message
from gymsdk.testing.endpoint import build_app, serve
from gymsdk.types import Item

COMPLETION: Item = {"choices": [{"message": {"role": "assistant", "content": "4"}, "finish_reason": "stop"}]}
ANSWERS = {"chat": json.dumps(COMPLETION), "responses": json.dumps({"output": [build_message("4")]})}

FAULTS = {
    "an error object": '{"error": {"message": "Provider returned error", "code": 502}}',
    "an error without a status": '{"error": {"message": "overloaded", "type": "server_error", "code": null}}',
    "an error as text": '{"error": "upstream timeout"}',
    "a rate limit": '{"error": {"message": "slow down", "type": "rate_limit_error"}}',
    "a rate limit of input tokens": (
        '{"error": {"message": "Number of input tokens has exceeded your rate limit", "type": "rate_limit_error"}}'
    ),
    "an error of an older vLLM": '{"object": "error", "message": "CUDA", "type": "InternalServerError", "code": 500}',
    "an error beside an empty list": '{"choices": [], "error": {"message": "x", "code": "503"}}',
    "a page": "<!DOCTYPE html><html><body>502 Bad Gateway</body></html>",
    "text": "upstream connect error or disconnect/reset before headers",
    "nothing": "",
    "half an answer": ANSWERS["chat"][:40],
    "another object": '{"status": "ok"}',
    "null": "null",
    "a list": "[]",
    "no choice": '{"choices": []}',
    "an answer given up": '{"choices": [{"message": {"content": ""}, "finish_reason": "error"}]}',
    "an error in the choice": '{"choices": [{"message": {"content": "half"}, "error": {"message": "x", "code": 502}}]}',
    "a failed Response": '{"status": "failed", "error": {"code": "server_error", "message": "x"}, "output": []}',
}


@asynccontextmanager
async def serve_texts(texts: Iterator[str]) -> AsyncIterator[tuple[str, list[str]]]:
    """Serve these bodies with status 200 in turn; yield the URL and the paths of the requests."""
    paths: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        paths.append(request.path)
        return web.Response(text=next(texts), content_type="text/html")

    application = web.Application()
    application.router.add_post("/{path:.*}", answer)
    async with serve(application) as url:
        yield url, paths


@pytest.mark.parametrize("provider", ["endpoint", "vllm", "openai"])
@pytest.mark.parametrize("api", ["chat", "responses"])
async def test_a_faulty_answer_with_status_200_is_tried_again(provider: str, api: Api) -> None:
    texts = [text for fault in FAULTS.values() for text in (fault, fault, ANSWERS[api])]
    async with serve_texts(iter(texts)) as (url, paths):
        policy = model(f"{provider}/m", base_url=url, api=api, api_key="k", wait=0.001)
        for number, fault in enumerate(FAULTS, 1):
            assert (await policy.respond({"input": "2+2"}))["status"] == "completed", fault
            assert len(paths) == 3 * number, fault


async def test_the_tries_are_bounded() -> None:
    async with serve_texts(text for text in FAULTS.values() for _ in range(3)) as (url, paths):
        for number, fault in enumerate(FAULTS, 1):
            with pytest.raises(Failed) as caught:
                await model("endpoint/m", base_url=url, wait=0.001, retries=2).respond({"input": "2+2"})
            assert len(paths) == 3 * number, fault
            assert caught.value.kind in {"model_bad_answer", "model_error", "model_rate_limited"}, fault


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ({"error": {"message": "no such model", "code": 404}}, "model_not_found"),
        ({"error": {"message": "wrong key", "type": "authentication_error"}}, "model_unauthorized"),
        ({"error": {"message": "bad", "type": "invalid_request_error", "code": "x"}}, "model_refused"),
        ({"choices": [{"message": {"content": 7}}]}, "model_bad_answer"),
    ],
)
async def test_an_error_that_another_try_cannot_mend_is_final(body: Item, kind: str) -> None:
    async with serve_texts(itertools.repeat(json.dumps(body))) as (url, paths):
        with pytest.raises(Failed) as caught:
            await model("endpoint/m", base_url=url, wait=0.001).respond({"input": "2+2"})
    assert (caught.value.kind, len(paths)) == (kind, 1)


async def test_a_prompt_that_is_too_long_ends_the_turn_also_with_status_200() -> None:
    body = {"error": {"message": "prompt is too long: 9000 tokens > 4096 maximum"}}
    async with serve_texts(itertools.repeat(json.dumps(body))) as (url, paths):
        response = await model("endpoint/m", base_url=url).respond({"input": "2+2"})
    assert (response["status"], len(paths)) == ("incomplete", 1)


async def test_an_answer_that_talks_about_errors_is_an_answer() -> None:
    text = '{"error": {"code": 500}} and "error": "x"'
    body = {"choices": [{"message": {"content": text}, "finish_reason": "stop"}], "error": None}
    async with serve_texts(itertools.repeat(json.dumps(body))) as (url, paths):
        response = await model("endpoint/m", base_url=url).respond({"input": "2+2"})
    assert (response["output"][0]["content"][0]["text"], len(paths)) == (text, 1)


async def test_all_calls_behind_a_faulty_proxy_are_answered() -> None:
    """A tenth of the answers of the proxy are errors or pages; with token ids a call takes three requests."""
    random_fault = random.Random(7)

    @web.middleware
    async def fail(request: web.Request, handler: web.RequestHandler) -> web.StreamResponse:  # type: ignore[type-arg]
        if random_fault.random() < 0.1:
            return web.Response(text=FAULTS[random_fault.choice(["an error object", "an error as text", "a page"])])
        answer: web.StreamResponse = await handler(request)  # type: ignore[operator]
        return answer

    application = build_app(model("scripted/echo"))
    application.middlewares.append(fail)
    async with serve(application) as url:
        for tokens in (False, True):
            policy = model("vllm/m", base_url=url, wait=0.001, tokens=tokens, retries=8)
            calls = [policy.respond({"input": f"say {number}"}) for number in range(60)]
            answers = await asyncio.gather(*calls)
            assert {answer["status"] for answer in answers} == {"completed"}
