"""A model's response through the model server, read by released SDKs: the same in every API, streamed or not."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from gymsdk import responses
from gymsdk.types import Item

from .proxies import ADD, CLIENTS, NAME, UPSTREAMS, Content, ProxySetup, read_content, request_sum, run_proxies

pytestmark = pytest.mark.asyncio(loop_scope="module")

CALL = responses.build_function_call("add", '{"a":40,"b":2}', "call_1")
ADDED = ("add", {"a": 40, "b": 2})
RESPONSES: dict[str, tuple[list[Item], str | None, Content]] = {
    "a text": ([responses.build_message("42 é\n\n😀")], None, Content(text="42 é\n\n😀")),
    "an empty text": ([responses.build_message("")], None, Content()),
    "reasoning and a text": (
        [responses.build_reasoning("hm\nhm"), responses.build_message("42")],
        None,
        Content("hm\nhm", "42"),
    ),
    "a call": ([CALL], None, Content(calls=(ADDED,), end="calls")),
    "reasoning, a text and parallel calls": (
        [
            responses.build_reasoning("hm"),
            responses.build_message("I add."),
            CALL,
            responses.build_function_call("add", {"a": 1, "b": 1}, "call_2"),
        ],
        None,
        Content("hm", "I add.", (ADDED, ("add", {"a": 1, "b": 1})), "calls"),
    ),
    "a truncated text": ([responses.build_message("4")], "max_output_tokens", Content(text="4", end="cut")),
    "a text withheld by a filter": ([responses.build_message("")], "content_filter", Content(end="withheld")),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def setup() -> AsyncIterator[ProxySetup]:
    """Yield the proxies that the tests of this module share."""
    async with run_proxies() as running:
        yield running


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("upstream", UPSTREAMS)
@pytest.mark.parametrize("prepared", RESPONSES)
async def test_every_client_reads_the_models_response(
    setup: ProxySetup, prepared: str, upstream: str, client: str, streamed: bool
) -> None:
    output, reason, expected = RESPONSES[prepared]
    setup.policy.prepare(*output, reason=reason)
    answer = await request_sum(setup, client, upstream, streamed=streamed)
    assert read_content(answer) == expected
    assert answer.model == NAME


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("upstream", UPSTREAMS)
async def test_reasoning_within_the_text_becomes_reasoning(
    setup: ProxySetup, upstream: str, client: str, streamed: bool
) -> None:
    setup.policy.prepare(responses.build_message("<think>hm</think>\n\n42"))
    answer = await request_sum(setup, client, upstream, streamed=streamed)
    assert (read_content(answer).thoughts.strip(), read_content(answer).text.strip()) == ("hm", "42")


@pytest.mark.slow
@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("upstream", UPSTREAMS)
async def test_the_model_receives_the_same_request_from_every_client(
    setup: ProxySetup, upstream: str, client: str
) -> None:
    setup.policy.prepare(responses.build_message("42"))
    await request_sum(setup, client, upstream, streamed=True)
    [request] = setup.policy.requests
    assert read_messages(request) == [("system", "Be brief."), ("user", "40 + 2?")]
    [tool] = request["tools"]
    assert (tool["name"], tool["description"], tool["parameters"]) == ("add", "Add.", ADD)
    assert "stream" not in request


def read_messages(request: Item) -> list[tuple[str, str]]:
    """Return the role and the text of each message before the model's turn; instructions have the role `system`."""
    instructions = [("system", request["instructions"])] if request.get("instructions") else []
    messages: Any = request["input"]
    items = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    return instructions + [(each["role"], read_text(each["content"])) for each in items]


def read_text(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


@pytest.mark.slow
@pytest.mark.parametrize("upstream", UPSTREAMS)
async def test_the_clients_model_name_is_ignored(setup: ProxySetup, upstream: str) -> None:
    setup.policy.prepare(responses.build_message("42"))
    await request_sum(setup, "chat", upstream, streamed=False)
    assert setup.policy.requests[0].get("model") in {NAME, None}
