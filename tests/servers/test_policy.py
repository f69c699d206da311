"""A served policy, called with the openai SDK and with plain HTTP."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import httpx
import pytest

from gymsdk import responses
from gymsdk.errors import Failed, UsageError
from gymsdk.testing.endpoint import REQUEST_TRACKER, build_app, serve
from gymsdk.testing.faults import Faults

from .engines import BODIES, HELLO, FixedModel, SlowModel, anthropic, endpoint_client, openai, root
from .nodes import wait_until

CALL = responses.build_function_call("add", '{"a":1}', "c1")


async def test_both_sdks_list_its_models():
    async with openai(FixedModel(), faults=Faults(context=99)) as client:
        assert [model.id async for model in client.models.list()] == ["stub"]
        one: Any = await client.models.retrieve("stub")
    assert (one.id, one.max_model_len) == ("stub", 99)
    async with anthropic(FixedModel()) as other:
        assert [found.id async for found in other.models.list()] == ["stub"]
        assert (await other.models.retrieve("stub")).display_name == "stub"
    async with endpoint_client(FixedModel()) as plain:
        assert (await plain.get("models/another")).status_code == 404
        assert (await plain.get(root(plain, "/"))).json() == {"status": "ok"}


async def test_a_bad_request_is_answered_in_openais_form_with_a_message():
    async with endpoint_client(FixedModel()) as client:
        for path, body, param, message in (
            ("chat/completions", "{torn", None, ""),
            ("chat/completions", "{}", "messages", ""),
            ("chat/completions", '{"messages": [{"role": "user", "content": "x"}], "n": 0}', "n", ""),
            ("chat/completions", '{"messages": []}', ..., "'messages' is empty"),
            ("responses", '{"input": ["x"]}', "input", ""),
            ("responses", '{"input": []}', ..., "'input' is empty"),
            ("responses", '{"input": "hi", "previous_response_id": "r"}', ..., "send the whole conversation"),
            ("responses", '{"input": "hi", "conversation": "c"}', ..., "send the whole conversation"),
            ("responses", '{"input": "hi", "tools": [{"type": "web"}]}', ..., "runs no tools of type 'web'"),
            ("responses", '{"input": [{"type": "item_reference"}]}', ..., "no item of type 'item_reference'"),
        ):
            answer = await client.post(path, content=body)
            error = answer.json()["error"]
            assert (answer.status_code, error["type"]) == (400, "invalid_request_error"), body
            assert param is ... or error["param"] == param, body
            assert error["message"]
            assert message in error["message"]


async def test_a_failed_policy_is_an_error_with_its_kind_and_a_large_prompt_is_read():
    for retryable, status in ((True, 503), (False, 422)):
        failure = Failed("no episode", kind="model_needs_episode", retryable=retryable)
        async with endpoint_client(FixedModel(failure=failure)) as client:
            answer = await client.post("responses", json={"input": "hi"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, "model_needs_episode")
    model = FixedModel()
    async with endpoint_client(model) as client:
        await client.post("responses", json={"input": "x" * 5_000_000})
    assert len(model.requests[0]["input"]) == 5_000_000


@pytest.mark.slow
async def test_errors_and_disconnects_occur_at_their_rates():
    found = []
    async with endpoint_client(FixedModel(), faults=Faults(errors=0.3, cuts=0.3)) as client:
        for _ in range(200):
            try:
                found.append((await client.post("chat/completions", json=HELLO)).status_code)
            except httpx.RemoteProtocolError:
                found.append(0)
    assert sum(status >= 500 for status in found) == pytest.approx(60, abs=25)
    assert found.count(0) == pytest.approx(60, abs=25)
    assert found.count(200) == pytest.approx(80, abs=25)


async def test_a_dropped_connection_ends_before_or_during_the_response_without_a_traceback(caplog):
    during_response = set()
    async with endpoint_client(FixedModel(responses.build_message("x" * 1000)), faults=Faults(cuts=1)) as client:
        for _ in range(20):
            with pytest.raises(httpx.RemoteProtocolError) as caught:
                await client.post("chat/completions", json=HELLO)
            during_response.add("complete message body" in str(caught.value))
    assert during_response == {True, False}
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_a_host_that_others_reach_needs_the_insecure_option():
    async with serve(build_app(FixedModel())) as url:
        port = int(url.split(":")[2].partition("/")[0])
    # The port is free again afterwards.
    async with serve(build_app(FixedModel()), port=port) as again:
        assert again == url
    for host in ("0.0.0.0", "", "::", "192.0.2.1"):
        with pytest.raises(UsageError, match="insecure=True"):
            async with serve(build_app(FixedModel()), host=host):
                pass
    async with serve(build_app(FixedModel()), host="0.0.0.0", insecure=True) as url, httpx.AsyncClient() as client:
        assert (await client.get(url.replace("0.0.0.0", "127.0.0.1") + "/models")).status_code == 200
    with pytest.raises(UsageError, match=r"'no such' is not an address of this machine .*; listen on 127\.0\.0\.1"):
        async with serve(build_app(FixedModel()), host="no such", insecure=True):
            pass


async def test_running_requests_finish_before_the_server_stops():
    slow = SlowModel()
    async with httpx.AsyncClient() as client:
        async with serve(build_app(slow, name="slow")) as url:
            answer = asyncio.create_task(client.post(f"{url}/chat/completions", json=HELLO))
            await wait_until(lambda: slow.started)
            asyncio.get_running_loop().call_later(0.1, slow.released.set)
        assert (await answer).json()["choices"][0]["message"]["content"] == "hello"


@pytest.mark.parametrize("path", BODIES)
async def test_an_interrupted_request_gets_an_error_of_its_api(path):
    slow, body = SlowModel(), BODIES[path]
    served = build_app(slow, name="slow")
    async with httpx.AsyncClient() as client, serve(served) as url:
        answer = asyncio.create_task(client.post(f"{url}/{path}", json=body))
        await wait_until(lambda: slow.started)
        await served[REQUEST_TRACKER].end(grace=0.05)
        interrupted = await answer
        later = await client.post(f"{url}/{path}", json=body)
    for found in (interrupted, later):
        assert (found.status_code, found.headers["retry-after"]) == (503, "5")
        assert "has been stopped" in found.json()["error"]["message"]
        assert ("type" in found.json()) == (path == "messages")


async def test_an_unknown_path_is_rejected_in_the_form_of_its_api():
    async with endpoint_client(FixedModel()) as client:
        nowhere = await client.post("embeddings", json={})
        anthropic_path = await client.post("files", json={}, headers={"anthropic-version": "2023-06-01"})
        wrong = await client.get("messages")
    assert (nowhere.status_code, nowhere.json()["error"]["type"]) == (404, "not_found_error")
    assert (anthropic_path.status_code, anthropic_path.json()["type"]) == (404, "error")
    assert (wrong.status_code, "type" in wrong.json()) == (405, True)
    assert "use POST" in wrong.json()["error"]["message"]


async def test_truncated_reasoning_shows_no_marker_and_text_keeps_characters_that_are_no_marker():
    policy = FixedModel(responses.build_reasoning("hm hm"), responses.build_message("yes"))
    async with endpoint_client(policy) as client:
        for room in range(1, 30):
            body = HELLO | {"max_tokens": room}
            message = (await client.post("chat/completions", json=body)).json()["choices"][0]["message"]
            assert "hm hm".startswith(message.get("reasoning_content", "").strip()), room
            assert "yes".startswith(message["content"].strip()), room
    async with endpoint_client(FixedModel(responses.build_message("1 < 2"))) as client:
        answer = await client.post("chat/completions", json=HELLO | {"max_tokens": 3})
    assert answer.json()["choices"][0]["message"]["content"] == "1 <"


async def test_a_response_has_log_probabilities_if_requested():
    async with openai(FixedModel(responses.build_reasoning("hm"), responses.build_message("yes"))) as client:
        whole: Any = await client.responses.create(
            model="any", input="hi", include=["message.output_text.logprobs"], top_logprobs=1
        )
        chances = whole.output[1].content[0].logprobs
    assert "".join(token.token for token in chances) == "yes"
    assert all(token.logprob < 0 and token.top_logprobs[0].token == token.token for token in chances)
