"""The model server, called with the openai SDK and with plain HTTP."""

from __future__ import annotations

import asyncio
import logging
import sys
from http import HTTPStatus
from typing import Any

import httpx
import pytest
from anthropic import NotFoundError
from openai import AsyncOpenAI

from gymsdk import Failed
from gymsdk.cluster.router import STICKY_KEY
from gymsdk.deploy.runner import BackgroundTask
from gymsdk.edge.addresses import bind_socket
from gymsdk.edge.listener import Listener
from gymsdk.servers import model as server
from gymsdk.types import Episode, Item

from .app_helpers import app_client, serve_app
from .engines import FixedModel
from .proxies import sdks

HI: list[Any] = [{"role": "user", "content": "hi"}]


class DeepModel(FixedModel):
    """A model with a deeply nested object in its usage, which also repeats the request's metadata."""

    def __init__(self, deep: Item) -> None:
        super().__init__()
        self._deep = deep

    async def respond(self, request: Item, *, episode: Episode | None = None) -> Item:
        response = await super().respond(request, episode=episode)
        return response | {"usage": {**response["usage"], "deep": self._deep}, "metadata": request.get("metadata")}


def sdk(client: httpx.AsyncClient, base: str = "/v1") -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"http://gym.test{base}", api_key="x", http_client=client, max_retries=0)


@pytest.mark.parametrize("base", ["/v1", "/ng-rollout/r1/v1", "/ng-rollout/r1/training-token-capture/v1"])
async def test_the_sdk_reads_both_forms_under_every_prefix(base):
    async with app_client(server.create_app(FixedModel())) as client:
        chat = await sdk(client, base).chat.completions.create(
            model="any", messages=[{"role": "user", "content": "hi"}]
        )
        response = await sdk(client, base).responses.create(model="any", input="hi")
    assert (chat.choices[0].message.content, response.output_text) == ("hello", "hello")


class AffinityModel(FixedModel):
    """A model that records the affinity key of each request."""

    def __init__(self) -> None:
        super().__init__()
        self.affinity_keys: list[str | None] = []

    async def respond(self, request: Item, *, episode: Episode | None = None) -> Item:
        self.affinity_keys.append(STICKY_KEY.get())
        return await super().respond(request, episode=episode)


async def test_affinity_follows_the_rollout_or_the_clients_cache_key():
    model_under_test = AffinityModel()
    async with app_client(server.create_app(model_under_test)) as client:
        await client.post("/ng-rollout/r1/v1/responses", json={"input": "a", "prompt_cache_key": "k"})
        await client.post("/ng-rollout/r1/training-token-capture/v1/messages", json={"max_tokens": 9, "messages": HI})
        await client.post("/v1/chat/completions", json={"messages": HI, "prompt_cache_key": "k"})
        await client.post("/v1/chat/completions", json={"messages": HI})
    assert model_under_test.affinity_keys == ["r1", "r1", "k", None]


async def test_a_model_is_listed_under_its_served_name_and_its_own_for_both_sdks():
    async with app_client(server.create_app(FixedModel())) as client:
        assert [found.id async for found in sdk(client).models.list()] == ["replies"]
    async with (
        serve_app(server.create_app(FixedModel(), serves="org/policy")) as url,
        sdks(url) as (openai, anthropic),
        httpx.AsyncClient(base_url=url) as client,
    ):
        assert [found.id async for found in openai.models.list()] == ["org/policy", "replies"]
        assert (await openai.models.retrieve("org/policy")).id == "org/policy"
        assert [found.display_name async for found in anthropic.models.list()] == ["org/policy", "replies"]
        assert (await anthropic.models.retrieve("org/policy")).type == "model"
        with pytest.raises(NotFoundError, match="lists org/policy, replies"):
            await anthropic.models.retrieve("another")
        missing = await client.get("/v1/models/another")
        answer = await client.post("/v1/responses", json={"input": "hi", "model": "another"})
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
    assert (answer.status_code, answer.json()["model"]) == (200, "replies")
    # Some clients reject null where a detail of the usage is unknown.
    usage = answer.json()["usage"]
    assert usage["input_tokens_details"] == {"cached_tokens": 0}
    assert usage["output_tokens_details"] == {"reasoning_tokens": 0}


@pytest.mark.parametrize(
    ("path", "prefix", "is_anthropic"),
    [
        ("/v1/messages", "", True),
        ("/ng-rollout/r1/v1/messages", "", True),
        ("/gym/policy_model/v1/responses", "/gym/policy_model", False),
    ],
)
async def test_a_request_that_the_stop_interrupts_gets_an_error_of_its_api(path, prefix, is_anthropic, caplog):
    caplog.set_level(logging.INFO, "gymsdk.requests")
    arrived = asyncio.Event()

    class Hanging:
        async def respond(self, _request: Item, **_: object) -> Item:
            arrived.set()
            await asyncio.sleep(60)
            raise AssertionError("the request was not cancelled")

    at = bind_socket("127.0.0.1")
    background_task = BackgroundTask("a server", Listener(server.create_app(Hanging()), at, grace=0.1, path=prefix).run)
    await background_task.wait_until_up(20)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{at.getsockname()[1]}") as client:
        body = {"input": "hi", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
        answer = asyncio.create_task(client.post(path, json=body))
        await arrived.wait()
        await background_task.stop(5)
        found = await answer
    assert (found.status_code, found.headers["retry-after"]) == (503, "5")
    assert ("type" in found.json(), "has been stopped" in found.json()["error"]["message"]) == (is_anthropic, True)
    logged = [record.fields["status"] for record in caplog.records if hasattr(record, "fields")]
    assert logged == [503], "the status that the client got"


async def test_a_path_outside_of_all_apis_is_not_found():
    async with app_client(server.create_app(FixedModel())) as client:
        answer = await client.post("/v1/embeddings", json={})
        wrong = await client.get("/v1/messages")
        outside = await client.get("/nowhere")
        for path in ("completions", "chat/completions", "responses", "responses/input_tokens"):
            # An error at a path of OpenAI has its form for every client.
            found = await client.get(f"/v1/{path}", headers={"anthropic-version": "2023-06-01"})
            assert (found.status_code, found.json().keys()) == (405, {"error"}), path
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (404, "not_found_error")
    assert "/v1/chat/completions" in error["message"]
    assert (wrong.status_code, wrong.json()["type"], wrong.headers["allow"]) == (405, "error", "POST")
    assert "/v1/messages does not accept GET; use POST" in wrong.json()["error"]["message"]
    assert outside.json().keys() == {"detail"}


@pytest.mark.parametrize("path", ["responses", "chat/completions", "messages"])
async def test_an_invalid_body_is_answered_in_the_form_of_each_api(path):
    deep = b'{"messages":' + b"[" * 20000 + b"]" * 20000 + b"}"
    bodies = [(content, {}, 400) for content in (b"{torn", b"[1]", b"", b"\xff", deep)]
    async with app_client(server.create_app(FixedModel())) as client:
        for content, headers, status in (*bodies, (b"{}", {"content-length": str(2**40)}, 413)):
            answer = await client.post(f"/v1/{path}", content=content, headers=headers)
            body = answer.json()
            assert (answer.status_code, bool(body["error"]["message"])) == (status, True), content[:20]
            assert body.get("type") == ("error" if path == "messages" else None)
            assert status == 413 or body["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("request_depth", "response_depth", "status"), [(1000, 1, 400), (1, 2000, 502)], ids=["the request", "the answer"]
)
async def test_a_too_deeply_nested_response_is_reported_with_a_message(request_depth, response_depth, status):
    deep: Item = {}
    for _ in range(response_depth):
        deep = {"a": deep}
    nested = '{"a":' * request_depth + "1" + "}" * request_depth
    async with app_client(server.create_app(DeepModel(deep))) as client:
        for streamed in ("false", "true"):
            body = f'{{"input":"hi","stream":{streamed},"metadata":{nested}}}'
            answer = await client.post("/v1/responses", content=body)
            # The depth that is too deep depends on the interpreter.
            if sys.version_info < (3, 12) or answer.status_code != HTTPStatus.OK:
                assert (answer.status_code, "nested too deeply" in answer.json()["error"]["message"]) == (status, True)


async def test_a_bad_request_is_answered_in_openais_form_and_an_unknown_key_is_not_an_error():
    model_under_test = FixedModel()
    async with app_client(server.create_app(model_under_test)) as client:
        for path, body, param in (
            ("responses", {}, "input"),
            ("responses", {"input": ["x"]}, "input"),
            ("responses", {"input": [{"role": "user", "content": 5}]}, "input"),
            ("responses", {"input": "x", "tools": 3}, "tools"),
            ("chat/completions", {}, "messages"),
            ("chat/completions", {"messages": [{"content": "x"}]}, "messages"),
            ("chat/completions", {"messages": [{"role": "assistant", "tool_calls": [7]}]}, "messages"),
            ("chat/completions", {"messages": HI, "n": 200}, "n"),
        ):
            answer = await client.post(f"/v1/{path}", json=body)
            error = answer.json()["error"]
            assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param), body
        body = {"input": "hi", "top_k": 3, "odd": 1}
        assert (await client.post("/v1/responses", json=body | {"stream": False})).status_code == 200
    assert model_under_test.requests == [body]


async def test_a_failure_of_the_adapter_has_its_status():
    for kind, retryable, status in (
        ("model_rate_limited", True, 429),
        ("model_unreachable", True, 503),
        ("model_timeout", True, 504),
        ("model_bad_answer", True, 502),
        ("model_refused", False, 400),
        ("model_bad_request", False, 400),
        ("model_unauthorized", False, 502),
        ("model_not_found", False, 502),
        ("model_misconfigured", False, 502),
        ("no_episode", False, 422),
    ):
        failure = Failed("no answer", kind=kind, retryable=retryable, retry_after=9 if retryable else None)
        async with app_client(server.create_app(FixedModel(failure=failure))) as client:
            answer = await client.post("/v1/chat/completions", json={"messages": HI})
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, kind)
        assert answer.headers.get("retry-after") == ("9" if retryable else None), kind
        assert answer.headers.get("x-should-retry") == ("false" if status == 502 and not retryable else None), kind
    async with app_client(server.create_app(FixedModel({"type": "function_call"}))) as client:
        answer = await client.post("/v1/chat/completions", json={"messages": HI})
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "model_bad_answer")
