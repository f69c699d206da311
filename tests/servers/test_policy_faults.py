"""Injected faults of a served policy, as clients see them."""

from __future__ import annotations

import asyncio
import json
import random
from statistics import fmean, median
from typing import Any

import httpx
import pytest
from openai import BadRequestError, RateLimitError
from pydantic import ValidationError

from gymsdk import responses
from gymsdk.convert.token_limits import is_context_overflow
from gymsdk.models.scripted import build
from gymsdk.testing.faults import Faults, draw_latency
from gymsdk.types import Item

from .engines import CALLS, FLAT, HELLO, THOUGHT, TOOL, FixedModel, anthropic, endpoint_client, openai, root
from .nodes import metric

BODIES = [
    ("chat/completions", HELLO),
    ("responses", {"input": "hi"}),
    ("messages", HELLO | {"max_tokens": 500}),
]


@pytest.mark.parametrize(
    ("spelled", "mean", "median_seconds"),
    [
        (0.2, 0.2, 0.2),
        ("0.2", 0.2, 0.2),
        ("2e-1", 0.2, 0.2),
        ("0.1-0.5", 0.3, 0.3),
        ("exp:0.3", 0.3, 0.208),
        ("lognormal:0.3:0.8", 0.413, 0.3),
    ],
)
def test_a_latency_is_drawn_from_its_distribution(spelled: float | str, mean: float, median_seconds: float) -> None:
    rng = random.Random(1)
    drawn = [draw_latency(spelled, rng) for _ in range(4000)]
    assert (fmean(drawn), median(drawn)) == pytest.approx((mean, median_seconds), rel=0.1)
    assert min(drawn) >= 0


@pytest.mark.parametrize(
    "wrong",
    [
        *({"latency": each} for each in ("", "x", "-1", "1-", "exp", "exp:x", "exp:1:2", "lognormal:1", "nan", "inf")),
        {"limited": 2},
        {"context": 1},
        {"errors": 0.5, "limited": 0.6},
    ],
)
def test_invalid_faults_are_rejected(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Faults.model_validate(wrong)


async def test_a_rate_limited_client_gets_retry_after() -> None:
    async with openai(FixedModel(), faults=Faults(limited=1)) as client:
        with pytest.raises(RateLimitError) as caught:
            await client.responses.create(model="any", input="hi")
    assert caught.value.response.headers["retry-after"] == "1"


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_errors_have_the_form_of_each_api(path: str, body: Item) -> None:
    async with endpoint_client(FixedModel(), faults=Faults(errors=1)) as client:
        answer = await client.post(path, json=body | {"stream": True})
    assert answer.status_code in {500, 502, 503}
    assert answer.json()["error"]["message"] == "this policy fails on purpose"


@pytest.mark.slow
async def test_malformed_arguments_occur_at_their_rate() -> None:
    found = []
    async with endpoint_client(FixedModel(*CALLS), faults=Faults(malformed=0.5)) as client:
        for _ in range(40):
            answer = (await client.post("chat/completions", json=HELLO)).json()
            first, second = answer["choices"][0]["message"]["tool_calls"]
            found.append(first["function"]["arguments"])
            assert second["function"]["arguments"] == '{"a": 2}'
    assert set(found) == {'{"a": 1}', '{"a"'}
    assert 8 < found.count('{"a"') < 32


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_a_truncated_stream_ends_properly_and_too_early(path: str, body: Item) -> None:
    async with (
        endpoint_client(FixedModel(), faults=Faults(truncated=1)) as broken,
        endpoint_client(FixedModel()) as sound,
    ):
        short = await broken.post(path, json=body | {"stream": True})
        whole = await sound.post(path, json=body | {"stream": True})
        plain = await broken.post(path, json=body)
    ends = ("data: [DONE]", "response.completed", "message_stop")
    assert any(end in whole.text for end in ends)
    assert not any(end in short.text for end in ends)
    assert short.text.endswith("\n\n")
    assert plain.json()["usage"]


async def test_a_dropped_stream_breaks_off() -> None:
    async with endpoint_client(FixedModel(), faults=Faults(cuts=1)) as client:
        for _ in range(10):
            with pytest.raises(httpx.RemoteProtocolError):
                await client.post("chat/completions", json=HELLO | {"stream": True})


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_a_prompt_that_exceeds_the_context_is_rejected_with_vllms_message(path: str, body: Item) -> None:
    async with endpoint_client(FixedModel(), faults=Faults(context=20)) as client:
        answer = await client.post(path, json=body)
    message = "This model's maximum context length is 20 tokens. However, your request has 21 input tokens."
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(message)
    assert is_context_overflow(400, answer.content)


async def test_a_response_that_could_not_fit_is_rejected() -> None:
    async with openai(FixedModel(), faults=Faults(context=100)) as client:
        assert [model.max_model_len async for model in client.models.list()] == [100]
        with pytest.raises(BadRequestError, match=r"too large: 90\. This model's maximum context length is 100 tokens"):
            await client.chat.completions.create(model="any", max_tokens=90, **HELLO)


async def test_a_response_ends_where_the_context_does() -> None:
    async with endpoint_client(FixedModel(responses.build_message("x" * 500)), faults=Faults(context=100)) as client:
        answer = (await client.post("chat/completions", json=HELLO)).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == 100


async def test_a_response_is_truncated_at_its_limit_in_every_api() -> None:
    async with openai(FixedModel(responses.build_message("hello world"))) as client:
        chat = await client.chat.completions.create(model="any", max_tokens=5, **HELLO)
        whole = await client.responses.create(model="any", input="hi", max_output_tokens=5)
    async with anthropic(FixedModel(responses.build_message("hello world"))) as other:
        message = await other.messages.create(model="any", max_tokens=5, **HELLO)
    assert chat.choices[0].message.content == whole.output_text == message.content[0].text == "hello"
    assert (chat.choices[0].finish_reason, message.stop_reason) == ("length", "max_tokens")
    assert (whole.status, whole.incomplete_details and whole.incomplete_details.reason) == (
        "incomplete",
        "max_output_tokens",
    )
    assert chat.usage is not None
    assert chat.usage.completion_tokens == message.usage.output_tokens == 5


@pytest.mark.parametrize(
    ("limit", "kinds"),
    [
        (10, ["reasoning"]),
        (50, ["reasoning", "message"]),
        (100, ["reasoning", "message", "function_call"]),
        (999, ["reasoning", "message", "function_call", "function_call"]),
    ],
)
async def test_a_truncated_turn_keeps_the_text_before_it(limit: int, kinds: list[str]) -> None:
    items = (THOUGHT, responses.build_message("well then"), *CALLS)
    async with endpoint_client(FixedModel(*items)) as client:
        answer = (await client.post("responses", json={"input": "hi", "max_output_tokens": limit})).json()
    assert [item["type"] for item in answer["output"]] == kinds
    assert answer["output"][0]["summary"][0]["text"][:2] == "tw"


@pytest.mark.parametrize(
    ("path", "field", "body"),
    [
        ("responses", "max_output_tokens", {"input": "hi"}),
        ("chat/completions", "max_tokens", HELLO),
        ("chat/completions", "max_completion_tokens", HELLO),
        ("chat/completions/render", "max_completion_tokens", HELLO),
        ("messages", "max_tokens", HELLO),
        ("completions", "max_tokens", {"prompt": [1, 2]}),
    ],
)
async def test_an_invalid_limit_is_rejected_by_its_name(path: str, field: str, body: Item) -> None:
    async with endpoint_client(FixedModel()) as client:
        for limit in (0, -1, "x", "5", True, 1.5, [3]):
            answer = await client.post(path, json=body | {field: limit})
            error = answer.json()["error"]
            assert (answer.status_code, error.get("param", field)) == (400, field), limit
            assert error["message"].startswith(f"{field} must be "), limit


async def test_calls_stay_in_the_text_if_the_engine_does_not_parse_them() -> None:
    async with endpoint_client(
        FixedModel(responses.build_message("well"), *CALLS[:1]), faults=Faults(unparsed=True)
    ) as client:
        [choice] = (await client.post("chat/completions", json=HELLO | {"tools": [TOOL]})).json()["choices"]
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"] == ('well\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>')


async def test_tools_are_rejected_with_vllms_message_if_no_parser_is_set() -> None:
    async with openai(FixedModel(), faults=Faults(refuses_tools=True)) as client:
        with pytest.raises(BadRequestError, match="--enable-auto-tool-choice and --tool-call-parser to be set"):
            await client.chat.completions.create(model="any", tools=[TOOL], **HELLO)
        with pytest.raises(BadRequestError, match="--enable-auto-tool-choice"):
            await client.responses.create(model="any", input="hi", tools=[FLAT])
        unused = await client.chat.completions.create(model="any", tools=[TOOL], tool_choice="none", **HELLO)
    assert unused.choices[0].message.content == "hello"


class WaitingModel:
    """A model that never answers; it sets an event when it receives a request and when the request is cancelled."""

    def __init__(self) -> None:
        self.called, self.cancelled = asyncio.Event(), asyncio.Event()

    async def respond(self, request: Item, *, episode: object = None) -> Item:
        self.called.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()
        return responses.build_response([], model="", request=request)


async def test_a_client_that_disconnects_cancels_its_request_and_is_counted() -> None:
    model = WaitingModel()
    async with endpoint_client(model) as client:
        request = asyncio.ensure_future(client.post("chat/completions", json=HELLO))
        await model.called.wait()
        request.cancel()
        async with asyncio.timeout(10):
            await model.cancelled.wait()
        found = (await client.get(root(client, "/metrics"))).text
    assert metric(found, "requests_total", status="499") == 1


async def test_the_same_seed_draws_the_same_faults_for_any_content() -> None:
    faults = Faults(errors=0.2, limited=0.2, malformed=0.5, seed=3)

    async def collect_statuses(model: Any) -> list[int]:
        async with endpoint_client(model, faults=faults) as client:
            return [(await client.post("chat/completions", json=HELLO)).status_code for _ in range(30)]

    found = await collect_statuses(FixedModel(*CALLS))
    assert found == await collect_statuses(build("echo"))
    assert {200, 429} < set(found)


def test_faults_are_reported_in_json() -> None:
    faults = Faults(latency="exp:0.3", context=10)
    assert Faults.model_validate(json.loads(faults.model_dump_json())) == faults
