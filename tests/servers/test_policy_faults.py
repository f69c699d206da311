"""Injected faults of a served policy, as clients see them."""

from __future__ import annotations

import asyncio
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

from .engines import (
    BODIES,
    CALLS,
    FLAT,
    HELLO,
    THOUGHT,
    TOOL,
    FixedModel,
    SlowModel,
    anthropic,
    endpoint_client,
    openai,
    root,
)
from .nodes import metric, wait_until


def test_a_latency_is_drawn_from_its_distribution():
    for spelled, mean, median_seconds in (
        (0.2, 0.2, 0.2),
        ("0.2", 0.2, 0.2),
        ("2e-1", 0.2, 0.2),
        ("0.1-0.5", 0.3, 0.3),
        ("exp:0.3", 0.3, 0.208),
        ("lognormal:0.3:0.8", 0.413, 0.3),
    ):
        rng = random.Random(1)
        drawn = [draw_latency(spelled, rng) for _ in range(4000)]
        assert (fmean(drawn), median(drawn)) == pytest.approx((mean, median_seconds), rel=0.1), spelled
        assert min(drawn) >= 0


def test_invalid_faults_are_rejected():
    latencies = ("", "x", "-1", -1, "1-", "0.5-0.1", "exp", "exp:x", "exp:1:2", "lognormal:1", "nan", "inf")
    for latency in latencies:
        with pytest.raises(ValidationError, match="is no latency" if latency != -1 else None):
            Faults.model_validate({"latency": latency})
    others = [{"limited": 2}, {"context": 1}, {"errors": 0.5, "limited": 0.6}, {"errors": 1.5}, {"lag": 1}]
    for wrong in (*others, {"errors": 0.6, "cuts": 0.6}):
        with pytest.raises(ValidationError):
            Faults.model_validate(wrong)


async def test_injected_errors_have_the_form_of_each_api():
    async with openai(FixedModel(), faults=Faults(limited=1)) as client:
        with pytest.raises(RateLimitError) as caught:
            await client.responses.create(model="any", input="hi")
    assert caught.value.response.headers["retry-after"] == "1"
    async with endpoint_client(FixedModel(), faults=Faults(errors=1)) as client:
        for path, body in BODIES.items():
            answer = await client.post(path, json=body | {"stream": True})
            assert answer.status_code in {500, 502, 503}
            assert answer.json()["error"]["message"] == "this policy fails on purpose"


@pytest.mark.slow
async def test_malformed_arguments_occur_at_their_rate():
    found = []
    async with endpoint_client(FixedModel(*CALLS), faults=Faults(malformed=0.5)) as client:
        for _ in range(40):
            answer = (await client.post("chat/completions", json=HELLO)).json()
            first, second = answer["choices"][0]["message"]["tool_calls"]
            found.append(first["function"]["arguments"])
            assert second["function"]["arguments"] == '{"a": 2}'
    assert set(found) == {'{"a": 1}', '{"a"'}
    assert 8 < found.count('{"a"') < 32


async def test_a_truncated_stream_ends_properly_and_too_early_and_a_dropped_one_breaks_off():
    ends = ("data: [DONE]", "response.completed", "message_stop")
    async with (
        endpoint_client(FixedModel(), faults=Faults(truncated=1)) as broken,
        endpoint_client(FixedModel()) as sound,
        endpoint_client(FixedModel(), faults=Faults(cuts=1)) as dropped,
    ):
        for path, body in BODIES.items():
            short = await broken.post(path, json=body | {"stream": True})
            whole = await sound.post(path, json=body | {"stream": True})
            plain = await broken.post(path, json=body)
            assert any(end in whole.text for end in ends)
            assert not any(end in short.text for end in ends)
            assert short.text.endswith("\n\n")
            assert plain.json()["usage"]
        for _ in range(10):
            with pytest.raises(httpx.RemoteProtocolError):
                await dropped.post("chat/completions", json=HELLO | {"stream": True})


async def test_a_prompt_that_exceeds_the_context_is_rejected_with_vllms_message():
    message = "This model's maximum context length is 20 tokens. However, your request has 21 input tokens."
    async with endpoint_client(FixedModel(), faults=Faults(context=20)) as client:
        for path, body in BODIES.items():
            answer = await client.post(path, json=body)
            assert answer.status_code == 400
            assert answer.json()["error"]["message"].startswith(message)
            assert is_context_overflow(400, answer.content)
    async with openai(FixedModel(responses.build_message("x" * 500)), faults=Faults(context=100)) as client:
        assert [model.max_model_len async for model in client.models.list()] == [100]
        with pytest.raises(BadRequestError, match=r"too large: 90\. This model's maximum context length is 100 tokens"):
            await client.chat.completions.create(model="any", max_tokens=90, **HELLO)
        # Without a limit, a response ends where the context does.
        answer = await client.chat.completions.create(model="any", **HELLO)
    assert (answer.choices[0].finish_reason, answer.usage.total_tokens) == ("length", 100)


async def test_a_response_is_truncated_at_its_limit_in_every_api():
    async with openai(FixedModel(responses.build_message("hello world"))) as client:
        chat = await client.chat.completions.create(model="any", max_tokens=5, **HELLO)
        whole = await client.responses.create(model="any", input="hi", max_output_tokens=5)
    async with anthropic(FixedModel(responses.build_message("hello world"))) as other:
        message = await other.messages.create(model="any", max_tokens=5, **HELLO)
    assert chat.choices[0].message.content == whole.output_text == message.content[0].text == "hello"
    assert (chat.choices[0].finish_reason, message.stop_reason) == ("length", "max_tokens")
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert chat.usage.completion_tokens == message.usage.output_tokens == 5


async def test_a_truncated_turn_keeps_the_text_before_it():
    items = (THOUGHT, responses.build_message("well then"), *CALLS)
    kinds = ["reasoning", "message", "function_call", "function_call"]
    async with endpoint_client(FixedModel(*items)) as client:
        for limit, count in ((10, 1), (50, 2), (100, 3), (999, 4)):
            answer = (await client.post("responses", json={"input": "hi", "max_output_tokens": limit})).json()
            assert [item["type"] for item in answer["output"]] == kinds[:count], limit
            assert answer["output"][0]["summary"][0]["text"][:2] == "tw"


async def test_an_invalid_limit_is_rejected_by_its_name():
    async with endpoint_client(FixedModel()) as client:
        for path, field, body in (
            ("responses", "max_output_tokens", {"input": "hi"}),
            ("chat/completions", "max_tokens", HELLO),
            ("chat/completions", "max_completion_tokens", HELLO),
            ("chat/completions/render", "max_completion_tokens", HELLO),
            ("messages", "max_tokens", HELLO),
            ("completions", "max_tokens", {"prompt": [1, 2]}),
        ):
            for limit in (0, -1, "x", "5", True, 1.5, [3]):
                answer = await client.post(path, json=body | {field: limit})
                error = answer.json()["error"]
                assert (answer.status_code, error.get("param", field)) == (400, field), limit
                assert error["message"].startswith(f"{field} must be "), limit


async def test_calls_stay_in_the_text_if_the_engine_does_not_parse_them():
    policy = FixedModel(responses.build_message("well"), *CALLS[:1])
    async with endpoint_client(policy, faults=Faults(unparsed=True)) as client:
        [choice] = (await client.post("chat/completions", json=HELLO | {"tools": [TOOL]})).json()["choices"]
    assert ("tool_calls" in choice["message"], choice["finish_reason"]) == (False, "stop")
    assert choice["message"]["content"] == 'well\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


async def test_tools_are_rejected_with_vllms_message_if_no_parser_is_set():
    async with openai(FixedModel(), faults=Faults(refuses_tools=True)) as client:
        with pytest.raises(BadRequestError, match="--enable-auto-tool-choice and --tool-call-parser to be set"):
            await client.chat.completions.create(model="any", tools=[TOOL], **HELLO)
        with pytest.raises(BadRequestError, match="--enable-auto-tool-choice"):
            await client.responses.create(model="any", input="hi", tools=[FLAT])
        unused = await client.chat.completions.create(model="any", tools=[TOOL], tool_choice="none", **HELLO)
    assert unused.choices[0].message.content == "hello"


async def test_a_client_that_disconnects_cancels_its_request_and_is_counted():
    model = SlowModel()
    async with endpoint_client(model) as client:
        request = asyncio.ensure_future(client.post("chat/completions", json=HELLO))
        await wait_until(lambda: model.started)
        request.cancel()
        await wait_until(lambda: model.cancelled)
        found = (await client.get(root(client, "/metrics"))).text
    assert metric(found, "requests_total", status="499") == 1


async def test_the_same_seed_draws_the_same_faults_for_any_content_and_latency_is_the_minimum_duration():
    async def collect_statuses(model: Any, **faults: float) -> list[int]:
        async with endpoint_client(model, faults=Faults(**faults)) as client:
            return [(await client.post("chat/completions", json=HELLO)).status_code for _ in range(30)]

    rates = {"errors": 0.2, "limited": 0.2, "malformed": 0.5}
    found = await collect_statuses(FixedModel(*CALLS), **rates, seed=3)
    assert found == await collect_statuses(build("echo"), **rates, seed=3)
    assert found != await collect_statuses(build("echo"), **rates, seed=4)
    assert {200, 429} < set(found)
    started = asyncio.get_running_loop().time()
    assert await collect_statuses(build("echo"), latency=0.002) == [200] * 30
    assert asyncio.get_running_loop().time() - started >= 30 * 0.002
