"""A served policy, called with the openai SDK and with plain HTTP."""

from __future__ import annotations

import asyncio
import logging

import httpx
import pytest
from openai import InternalServerError
from pydantic import ValidationError

from gymsdk import responses
from gymsdk.errors import Failed, UsageError
from gymsdk.testing.endpoint import build_app, serve
from gymsdk.testing.faults import NO_FAULT, Faults

from .engines import FLAT, HELLO, FixedModel, endpoint_client, openai

CALL = responses.build_function_call("add", '{"a":1}', "c1")


async def test_the_sdk_reads_a_chat_completion() -> None:
    async with openai(FixedModel(responses.build_reasoning("hmm"), responses.build_message("hello"))) as client:
        completion = await client.chat.completions.create(model="stub", messages=[{"role": "user", "content": "hi"}])
    [choice] = completion.choices
    assert (choice.message.content, choice.finish_reason, completion.model) == ("hello", "stop", "stub")
    assert completion.usage is not None
    assert completion.usage.total_tokens == 7


async def test_the_sdk_reads_the_tool_calls_of_a_chat_completion() -> None:
    async with openai(FixedModel(CALL)) as client:
        completion = await client.chat.completions.create(model="stub", messages=[{"role": "user", "content": "hi"}])
    [choice] = completion.choices
    [call] = choice.message.tool_calls or []
    assert (choice.finish_reason, call.id, call.function.arguments) == ("tool_calls", "c1", '{"a":1}')


async def test_the_sdk_reads_a_response() -> None:
    async with openai(FixedModel(responses.build_message("hello"), CALL)) as client:
        response = await client.responses.create(model="stub", input="hi", tools=[FLAT], temperature=0.5)
    assert (response.output_text, response.status, response.temperature) == ("hello", "completed", 0.5)
    assert [item.type for item in response.output] == ["message", "function_call"]
    assert response.usage is not None
    assert response.usage.total_tokens == 7


async def test_the_sdk_lists_the_one_model() -> None:
    async with openai(FixedModel()) as client:
        assert [model.id async for model in client.models.list()] == ["stub"]


async def test_the_root_answers() -> None:
    async with endpoint_client(FixedModel()) as client:
        assert (await client.get(str(client.base_url).replace("/v1/", "/"))).json() == {"status": "ok"}


async def test_the_policy_receives_items_and_tools() -> None:
    model = FixedModel()
    function = {"name": "add", "parameters": {}}
    body = HELLO | {"tools": [{"type": "function", "function": function}], "max_tokens": 5, "top_k": 2}
    async with endpoint_client(model) as client:
        await client.post("chat/completions", json=body)
    assert model.requests == [
        {
            "input": [{"role": "user", "content": "hi"}],
            "tools": [{"type": "function"} | function],
            "max_output_tokens": 5,
            "top_k": 2,
        }
    ]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("chat/completions", "{torn", None),
        ("chat/completions", "[1]", None),
        ("chat/completions", "{}", "messages"),
        ("chat/completions", '{"messages": "hi"}', "messages"),
        ("chat/completions", '{"messages": [{"content": "hi"}]}', "messages"),
        ("chat/completions", '{"messages": [{"role": "assistant", "tool_calls": [7]}]}', "messages"),
        ("chat/completions", '{"messages": [{"role": "user", "content": "x"}], "n": 0}', "n"),
        ("responses", "{}", "input"),
        ("responses", '{"input": ["x"]}', "input"),
    ],
)
async def test_a_bad_request_is_answered_in_openais_form(path: str, body: str, param: str | None) -> None:
    async with endpoint_client(FixedModel()) as client:
        answer = await client.post(path, content=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert error["message"]


@pytest.mark.parametrize(("retryable", "status"), [(True, 503), (False, 422)])
async def test_a_failed_policy_is_an_error_with_its_kind(retryable: bool, status: int) -> None:
    failure = Failed("no episode", kind="model_needs_episode", retryable=retryable)
    async with endpoint_client(FixedModel(failure=failure)) as client:
        answer = await client.post("responses", json={"input": "hi"})
    assert answer.status_code == status
    assert answer.json()["error"]["code"] == "model_needs_episode"


async def test_a_large_prompt_is_read() -> None:
    model = FixedModel()
    async with endpoint_client(model) as client:
        await client.post("responses", json={"input": "x" * 5_000_000})
    assert len(model.requests[0]["input"]) == 5_000_000


async def statuses(faults: Faults, calls: int = 40) -> list[int]:
    """Return the status of each call, or 0 for a dropped connection."""
    found = []
    async with endpoint_client(FixedModel(responses.build_message("x" * 1000)), faults=faults) as client:
        for _ in range(calls):
            try:
                found.append((await client.post("chat/completions", json=HELLO)).status_code)
            except httpx.RemoteProtocolError:
                found.append(0)
    return found


@pytest.mark.slow
async def test_errors_and_disconnects_occur_at_their_rates() -> None:
    found = await statuses(Faults(errors=0.3, cuts=0.3), calls=200)
    assert sum(status >= 500 for status in found) == pytest.approx(60, abs=25)
    assert found.count(0) == pytest.approx(60, abs=25)
    assert found.count(200) == pytest.approx(80, abs=25)


async def test_the_same_seed_fails_the_same_calls() -> None:
    faults = Faults(errors=0.4, cuts=0.2, seed=7)
    assert await statuses(faults) == await statuses(faults) != await statuses(Faults(errors=0.4, cuts=0.2, seed=8))


async def test_a_policy_without_faults_never_fails() -> None:
    assert await statuses(NO_FAULT) == [200] * 40


async def test_a_dropped_connection_ends_before_or_during_the_response_without_a_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    during_response = set()
    async with endpoint_client(FixedModel(responses.build_message("x" * 1000)), faults=Faults(cuts=1)) as client:
        for _ in range(20):
            with pytest.raises(httpx.RemoteProtocolError) as caught:
                await client.post("chat/completions", json=HELLO)
            during_response.add("complete message body" in str(caught.value))
    assert during_response == {True, False}
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_the_sdk_reads_an_injected_error() -> None:
    async with openai(FixedModel(), faults=Faults(errors=1)) as client:
        with pytest.raises(InternalServerError, match="on purpose"):
            await client.responses.create(model="stub", input="hi")


async def test_latency_is_the_minimum_duration_of_a_response() -> None:
    loop = asyncio.get_running_loop()
    async with endpoint_client(FixedModel(), faults=Faults(latency=0.05)) as client:
        start = loop.time()
        await client.post("chat/completions", json=HELLO)
    assert loop.time() - start >= 0.05


@pytest.mark.parametrize("wrong", [{"errors": 1.5}, {"latency": -1}, {"errors": 0.6, "cuts": 0.6}, {"lag": 1}])
def test_invalid_faults_are_rejected(wrong: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        Faults.model_validate(wrong)


async def test_the_port_is_free_again_afterwards() -> None:
    async with serve(build_app(FixedModel())) as url:
        port = int(url.split(":")[2].partition("/")[0])
    async with serve(build_app(FixedModel()), port=port) as again:
        assert again == url


@pytest.mark.parametrize("host", ["0.0.0.0", "", "::", "192.0.2.1"])
async def test_a_host_that_others_reach_needs_the_insecure_option(host: str) -> None:
    with pytest.raises(UsageError, match="insecure=True"):
        async with serve(build_app(FixedModel()), host=host):
            pass


async def test_an_insecure_host_is_served_on() -> None:
    async with serve(build_app(FixedModel()), host="0.0.0.0", insecure=True) as url, httpx.AsyncClient() as client:
        answer = await client.get(url.replace("0.0.0.0", "127.0.0.1") + "/models")
    assert answer.status_code == 200
