"""A model's response through the model server, read by released SDKs: the same in every API, streamed or not."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from gymsdk import responses
from gymsdk.types import Item

from .proxies import ADD, CLIENTS, NAME, UPSTREAMS, Rig, Said, asked, rigged, said

pytestmark = pytest.mark.asyncio(loop_scope="module")

CALL = responses.build_function_call("add", '{"a":40,"b":2}', "call_1")
ADDED = ("add", {"a": 40, "b": 2})
SAYINGS: dict[str, tuple[list[Item], str | None, Said]] = {
    "a text": ([responses.build_message("42 é\n\n😀")], None, Said(text="42 é\n\n😀")),
    "nothing": ([responses.build_message("")], None, Said()),
    "thoughts and a text": (
        [responses.build_reasoning("hm\nhm"), responses.build_message("42")],
        None,
        Said("hm\nhm", "42"),
    ),
    "a call": ([CALL], None, Said(calls=(ADDED,), end="calls")),
    "thoughts, a text and calls at once": (
        [
            responses.build_reasoning("hm"),
            responses.build_message("I add."),
            CALL,
            responses.build_function_call("add", {"a": 1, "b": 1}, "call_2"),
        ],
        None,
        Said("hm", "I add.", (ADDED, ("add", {"a": 1, "b": 1})), "calls"),
    ),
    "a text cut short": ([responses.build_message("4")], "max_output_tokens", Said(text="4", end="cut")),
    "what a filter held back": ([responses.build_message("")], "content_filter", Said(end="withheld")),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig() -> AsyncIterator[Rig]:
    """The proxies that the tests here share."""
    async with rigged() as made:
        yield made


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("upstream", UPSTREAMS)
@pytest.mark.parametrize("saying", SAYINGS)
async def test_every_client_reads_the_models_response(
    rig: Rig, saying: str, upstream: str, client: str, streamed: bool
) -> None:
    output, reason, expected = SAYINGS[saying]
    rig.policy.says(*output, reason=reason)
    answer = await asked(rig, client, upstream, streamed=streamed)
    assert said(answer) == expected
    assert answer.model == NAME


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("upstream", UPSTREAMS)
async def test_reasoning_within_the_text_becomes_reasoning(
    rig: Rig, upstream: str, client: str, streamed: bool
) -> None:
    rig.policy.says(responses.build_message("<think>hm</think>\n\n42"))
    answer = await asked(rig, client, upstream, streamed=streamed)
    assert (said(answer).thoughts.strip(), said(answer).text.strip()) == ("hm", "42")


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("upstream", UPSTREAMS)
async def test_the_model_receives_the_same_request_from_every_client(rig: Rig, upstream: str, client: str) -> None:
    rig.policy.says(responses.build_message("42"))
    await asked(rig, client, upstream, streamed=True)
    [given] = rig.policy.asked
    assert opening(given) == [("system", "Be brief."), ("user", "40 + 2?")]
    [tool] = given["tools"]
    assert (tool["name"], tool["description"], tool["parameters"]) == ("add", "Add.", ADD)
    assert "stream" not in given


def opening(request: Item) -> list[tuple[str, str]]:
    """Who says what before the model does; instructions are the system's words."""
    led = [("system", request["instructions"])] if request.get("instructions") else []
    given: Any = request["input"]
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    return led + [(each["role"], words(each["content"])) for each in items]


def words(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


@pytest.mark.parametrize("upstream", UPSTREAMS)
async def test_the_clients_model_name_is_ignored(rig: Rig, upstream: str) -> None:
    rig.policy.says(responses.build_message("42"))
    await asked(rig, "chat", upstream, streamed=False)
    assert rig.policy.asked[0].get("model") in {NAME, None}
