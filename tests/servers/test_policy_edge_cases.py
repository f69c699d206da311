"""Edge cases of a policy endpoint: its stop, unknown paths, its models, and requests that it cannot answer."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from gymsdk import responses
from gymsdk.convert.api import InboundApi
from gymsdk.convert.apis import INBOUND_APIS
from gymsdk.errors import UsageError
from gymsdk.testing.endpoint import REQUEST_TRACKER, build_app, serve
from gymsdk.testing.faults import Faults
from gymsdk.types import Episode, Item

from .engines import HELLO, FixedModel, anthropic, endpoint_client, openai

PATHS = [("responses", {"input": "hi"}), ("chat/completions", HELLO), ("messages", HELLO | {"max_tokens": 9})]


class SlowModel:
    """A policy that sets *called* when it receives a request and answers once it is released."""

    def __init__(self) -> None:
        self.called, self.released = asyncio.Event(), asyncio.Event()

    async def respond(self, request: Item, *, episode: Episode | None = None) -> Item:
        self.called.set()
        await self.released.wait()
        return responses.build_response([responses.build_message("late")], model="slow", request=request)


async def test_running_requests_finish_before_the_server_stops() -> None:
    slow = SlowModel()
    async with httpx.AsyncClient() as client:
        async with serve(build_app(slow, name="slow")) as url:
            answer = asyncio.create_task(client.post(f"{url}/chat/completions", json=HELLO))
            await slow.called.wait()
            asyncio.get_running_loop().call_later(0.1, slow.released.set)
        assert (await answer).json()["choices"][0]["message"]["content"] == "late"


@pytest.mark.parametrize(("path", "body"), PATHS)
async def test_an_interrupted_request_gets_an_error_of_its_api(path: str, body: Item) -> None:
    slow, api = SlowModel(), INBOUND_APIS[path]
    served = build_app(slow, name="slow")
    async with httpx.AsyncClient() as client, serve(served) as url:
        answer = asyncio.create_task(client.post(f"{url}/{path}", json=body))
        await slow.called.wait()
        await served[REQUEST_TRACKER].end(grace=0.05)
        interrupted = await answer
        later = await client.post(f"{url}/{path}", json=body)
    for each in (interrupted, later):
        assert (each.status_code, each.headers["retry-after"]) == (503, "5")
        assert "has been stopped" in read_error_message(api, each)


def read_error_message(api: InboundApi, answer: httpx.Response) -> str:
    """Return the message of an error, and check that the error has the form of the API."""
    body = answer.json()
    assert ("type" in body) == (api.path == "messages")
    message: str = body["error"]["message"]
    return message


async def test_an_unknown_path_is_rejected_in_the_form_of_its_api() -> None:
    async with endpoint_client(FixedModel()) as client:
        nowhere = await client.post("embeddings", json={})
        anthropic_path = await client.post("files", json={}, headers={"anthropic-version": "2023-06-01"})
        wrong = await client.get("messages")
    assert (nowhere.status_code, nowhere.json()["error"]["type"]) == (404, "not_found_error")
    assert (anthropic_path.status_code, anthropic_path.json()["type"]) == (404, "error")
    assert wrong.status_code == 405
    assert "use POST" in read_error_message(INBOUND_APIS["messages"], wrong)


async def test_both_sdks_list_its_models() -> None:
    async with openai(FixedModel(), faults=Faults(context=99)) as client:
        one: Any = await client.models.retrieve("stub")
    assert (one.id, one.max_model_len) == ("stub", 99)
    async with anthropic(FixedModel()) as other:
        assert [each.id async for each in other.models.list()] == ["stub"]
        assert (await other.models.retrieve("stub")).display_name == "stub"
    async with endpoint_client(FixedModel()) as plain:
        assert (await plain.get("models/another")).status_code == 404


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("responses", {"input": "hi", "previous_response_id": "resp_1"}, "send the whole conversation"),
        ("responses", {"input": "hi", "conversation": "conv_1"}, "send the whole conversation"),
        ("responses", {"input": "hi", "tools": [{"type": "web_search"}]}, "runs no tools of type 'web_search'"),
        ("responses", {"input": [{"type": "item_reference", "id": "x"}]}, "no item of type 'item_reference'"),
        ("responses", {"input": []}, "'input' is empty"),
        ("chat/completions", {"messages": []}, "'messages' is empty"),
    ],
)
async def test_a_request_that_no_policy_can_answer_is_rejected_with_a_message(
    path: str, body: Item, message: str
) -> None:
    async with endpoint_client(FixedModel()) as client:
        answer = await client.post(path, json=body)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


@pytest.mark.parametrize("room", range(1, 30))
async def test_truncated_reasoning_shows_no_marker(room: int) -> None:
    async with endpoint_client(
        FixedModel(responses.build_reasoning("hm hm"), responses.build_message("yes"))
    ) as client:
        body = HELLO | {"max_tokens": room}
        message = (await client.post("chat/completions", json=body)).json()["choices"][0]["message"]
    assert "hm hm".startswith(message.get("reasoning_content", "").strip())
    assert "yes".startswith(message["content"].strip())


async def test_truncated_text_keeps_characters_that_are_not_a_marker() -> None:
    async with endpoint_client(FixedModel(responses.build_message("1 < 2"))) as client:
        answer = await client.post("chat/completions", json=HELLO | {"max_tokens": 3})
    assert answer.json()["choices"][0]["message"]["content"] == "1 <"


async def test_a_response_has_log_probabilities_if_requested() -> None:
    async with openai(FixedModel(responses.build_reasoning("hm"), responses.build_message("yes"))) as client:
        whole: Any = await client.responses.create(
            model="any", input="hi", include=["message.output_text.logprobs"], top_logprobs=1
        )
        chances = whole.output[1].content[0].logprobs
    assert "".join(each.token for each in chances) == "yes"
    assert all(each.logprob < 0 and each.top_logprobs[0].token == each.token for each in chances)


async def test_an_invalid_host_is_reported() -> None:
    with pytest.raises(UsageError, match=r"'no such' is not an address of this machine .*; listen on 127\.0\.0\.1"):
        async with serve(build_app(FixedModel()), host="no such", insecure=True):
            pass


@pytest.mark.parametrize("latency", ["0.5-0.1", "abc"])
def test_an_invalid_latency_is_rejected(latency: str) -> None:
    with pytest.raises(ValueError, match="is no latency"):
        Faults(latency=latency)
