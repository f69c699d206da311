"""The model server, asked by the openai SDK and by plain HTTP."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from gymsdk import Failed, model, wire
from gymsdk.servers import model as server
from gymsdk.transcript import Item
from gymsdk.types import Episode, Model

from .reached import asked

HI: list[Any] = [{"role": "user", "content": "hi"}]


class Replies:
    """Answers with the same items every time, or fails; remembers what it was asked."""

    name = "replies"

    def __init__(self, *output: Item, failure: Failed | None = None) -> None:
        self.output = list(output) or [wire.message("hello")]
        self.failure = failure
        self.asked: list[Item] = []

    async def respond(self, request: Item, *, episode: Episode | None = None) -> Item:
        self.asked.append(request)
        if self.failure:
            raise self.failure
        return wire.response(self.output, model="replies", usage=wire.usage(3, 4), request=request)


def sdk(client: httpx.AsyncClient, base: str = "/v1") -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"http://gym.test{base}", api_key="x", http_client=client, max_retries=0)


@pytest.mark.parametrize("base", ["/v1", "/ng-rollout/r1/v1", "/ng-rollout/r1/training-token-capture/v1"])
async def test_the_sdk_reads_both_forms_under_every_prefix(base: str) -> None:
    async with asked(server.app(Replies())) as client:
        chat = await sdk(client, base).chat.completions.create(
            model="any", messages=[{"role": "user", "content": "hi"}]
        )
        response = await sdk(client, base).responses.create(model="any", input="hi")
    assert (chat.choices[0].message.content, response.output_text) == ("hello", "hello")


async def test_details_nobody_knows_are_zeros_for_clients_that_take_no_null() -> None:
    async with asked(server.app(Replies())) as client:
        told = (await client.post("/v1/responses", json={"input": "hi"})).json()["usage"]
    assert told["input_tokens_details"] == {"cached_tokens": 0}
    assert told["output_tokens_details"] == {"reasoning_tokens": 0}


async def test_the_sdk_lists_the_one_model() -> None:
    async with asked(server.app(Replies())) as client:
        assert [each.id async for each in sdk(client).models.list()] == ["replies"]


async def test_a_key_nobody_knows_is_no_error() -> None:
    told = Replies()
    async with asked(server.app(told)) as client:
        answer = await client.post("/v1/responses", json={"input": "hi", "top_k": 3, "stream": False})
    assert answer.status_code == 200
    assert told.asked == [{"input": "hi", "top_k": 3}]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("responses", {}, "input"),
        ("responses", {"input": ["x"]}, "input"),
        ("responses", {"input": [{"role": "user", "content": 5}]}, "input"),
        ("responses", {"input": "x", "tools": 3}, "tools"),
        ("responses", {"input": "x", "stream": True}, "stream"),
        ("chat/completions", {}, "messages"),
        ("chat/completions", {"messages": [{"content": "x"}]}, "messages"),
        ("chat/completions", {"messages": [{"role": "assistant", "tool_calls": [7]}]}, "messages"),
        ("chat/completions", {"messages": [{"role": "user", "content": "x"}], "n": 2}, "n"),
        ("chat/completions", {"messages": [{"role": "user", "content": "x"}], "stream": True}, "stream"),
    ],
)
async def test_a_bad_request_is_answered_in_openais_form(path: str, body: Item, param: str) -> None:
    async with asked(server.app(Replies())) as client:
        answer = await client.post(f"/v1/{path}", json=body)
    assert answer.status_code == 400
    assert (answer.json()["error"]["type"], answer.json()["error"]["param"]) == ("invalid_request_error", param)


@pytest.mark.parametrize(
    ("kind", "retryable", "status"),
    [
        ("model_rate_limited", True, 429),
        ("model_unreachable", True, 503),
        ("model_refused", False, 400),
        ("no_episode", False, 422),
    ],
)
async def test_a_failure_of_the_adapter_has_its_status(kind: str, retryable: bool, status: int) -> None:
    failure = Failed("no answer", kind=kind, retryable=retryable, retry_after=9 if retryable else None)
    async with asked(server.app(Replies(failure=failure))) as client:
        answer = await client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]})
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, kind)
    assert answer.headers.get("retry-after") == ("9" if retryable else None)


@pytest.mark.parametrize("text", [b"{torn", b"[1]", b"\xff"])
async def test_a_body_that_is_no_object_is_answered_in_openais_form(text: bytes) -> None:
    async with asked(server.app(Replies())) as client:
        answer = await client.post("/v1/responses", content=text)
    assert (answer.status_code, answer.json()["error"]["type"]) == (422, "invalid_request_error")


@pytest.mark.parametrize("output", [[{"type": "function_call"}], [{"id": "x"}]])
async def test_an_answer_that_is_no_completion_is_the_models_failure(output: list[Any]) -> None:
    async with asked(server.app(Replies(*output))) as client:
        answer = await client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_bad_answer")


async def test_the_oracle_says_where_it_plays() -> None:
    oracle: Model = model("scripted/oracle")
    async with asked(server.app(oracle)) as client:
        answer = await client.post("/v1/responses", json={"input": "hi"})
    assert answer.status_code == 422
    assert "POST the row to /run of an agent, or serve another model" in answer.json()["error"]["message"]
