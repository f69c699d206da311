"""A remote model: found through the head, one server per episode, failures with the server's own kinds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from gymsdk import Model, load, model, play, responses
from gymsdk.deploy.node import Node
from gymsdk.errors import Failed
from gymsdk.http import client
from gymsdk.servers import instances as waiting
from gymsdk.servers import model as model_server
from gymsdk.servers.instances import InstanceDirectory, nodes_fetcher
from gymsdk.servers.remote_model import RemoteModel
from gymsdk.servers.reports import HeadSnapshot, Instance
from gymsdk.servers.service import Service
from gymsdk.types import Episode, Item

from .nodes import LOOK, heading, listening, noded

REQUEST: Item = {"input": [{"role": "user", "content": "say"}]}


class Told:
    """A model with a fixed reply that records its requests."""

    name = "told"

    def __init__(self, said: str | Failed) -> None:
        self.said = said
        self.asked = 0

    async def respond(self, request: Item, *, episode: Episode | None = None) -> Item:
        self.asked += 1
        if isinstance(self.said, Failed):
            raise self.said
        return responses.build_response([responses.build_message(self.said)], model="told")


@pytest.fixture(autouse=True)
async def closed():
    yield
    await client.aclose()


@asynccontextmanager
async def served(*models: Model, **options: Any) -> AsyncIterator[tuple[RemoteModel, list[AsyncExitStack]]]:
    """A model elsewhere that has these *models* as its instances, and what ends each of their servers."""
    async with AsyncExitStack() as stack:
        head_url = await stack.enter_async_context(heading())
        ends = []
        for each in models:
            ending = await stack.enter_async_context(AsyncExitStack())
            port = await ending.enter_async_context(listening(model_server.create_app(each)))
            service = Service(
                name="policy_model", kind="responses_api_models", implementation="gymsdk_model", port=port
            )
            await stack.enter_async_context(noded(Node(head_url, [service])))
            ends.append(ending)
        known = InstanceDirectory(nodes_fetcher(head_url), max_age=LOOK)
        yield (
            RemoteModel("policy_model", known, **{"wait_seconds": 0.3, "retry": client.Retry(times=0)} | options),
            ends,
        )


async def said(asked: RemoteModel, episode: Episode | None = None) -> str:
    response = await asked.respond(REQUEST, episode=episode)
    text: str = response["output"][0]["content"][0]["text"]
    return text


async def test_requests_go_to_the_servers_that_the_head_lists():
    async with served(Told("yes")) as (asked, _):
        assert await said(asked) == "yes"


async def test_an_episode_stays_with_one_server_and_episodes_are_distributed():
    models = [Told("one"), Told("other")]
    found = load("multineedle")
    async with found, served(*models) as (asked, _):
        for number in range(16):
            row = next(found.tasks("train", seed=number)).row()
            episode = await found.reset(row, id=f"r{number}")
            assert len({await said(asked, episode) for _ in range(3)}) == 1
            await found.close(episode)
    assert all(each.asked for each in models)


async def test_an_episode_continues_at_another_server_if_its_own_is_lost():
    models = [Told("one"), Told("one")]
    async with served(*models) as (asked, ends):
        await ends[0].aclose()
        assert [await said(asked) for _ in range(4)] == ["one"] * 4
    assert models[1].asked == 4


async def test_without_a_server_the_error_explains_how_to_start_one():
    async with served() as (asked, _):
        with pytest.raises(Failed, match="`gymsdk serve ENVIRONMENT --role model --model NAME --head URL`") as raised:
            await asked.respond(REQUEST)
    assert (raised.value.kind, raised.value.retryable) == ("model_unreachable", True)


async def test_without_a_server_the_error_names_the_environment_for_scripted_models():
    async with load("multineedle") as found, served() as (asked, _):
        rollout = await play(found, asked, next(found.tasks("train")).row())
    assert rollout.failure is not None
    assert "`gymsdk serve multineedle --role model --model NAME --head URL`" in rollout.failure.message


async def test_without_a_server_the_error_names_the_configuration_file():
    with pytest.raises(Failed, match=r"no model server 'judge' .*`gymsdk serve --config FILE --role model --head URL`"):
        await RemoteModel("judge", InstanceDirectory(nobody), wait_seconds=0).respond(REQUEST)


async def nobody() -> HeadSnapshot:
    return HeadSnapshot()


@pytest.mark.parametrize(
    ("failure", "kind", "retryable"),
    [
        (Failed("too long", kind="model_refused"), "model_refused", False),
        (Failed("slow down", kind="model_rate_limited", retryable=True), "model_rate_limited", True),
        (Failed("lost", kind="model_unreachable", retryable=True, retry_after=2.0), "model_unreachable", True),
        (Failed("odd", kind="own_word"), "model_refused", False),
    ],
)
async def test_a_remote_failure_keeps_its_kind(failure: Failed, kind: str, retryable: bool):
    async with served(Told(failure)) as (asked, _):
        with pytest.raises(Failed, match=str(failure)) as raised:
            await asked.respond(REQUEST)
    assert (raised.value.kind, raised.value.retryable) == (kind, retryable)


async def test_the_remote_oracle_reports_that_it_cannot_answer():
    async with load("multineedle") as found, served(model("scripted/oracle")) as (asked, _):
        rollout = await play(found, asked, next(found.tasks("train")).row())
    assert rollout.failure is not None
    assert (rollout.failure.stage, rollout.failure.kind, rollout.failure.retryable) == ("model", "no_episode", False)


async def test_a_remote_response_is_played_as_in_process():
    async with load("multineedle") as found:
        row = next(found.tasks("train")).row()
        here = await play(found, Told("yes"), row)
        async with served(Told("yes")) as (asked, _):
            there = await play(found, asked, row)
    assert (there.outcome, there.reward, there.components) == ("scored", here.reward, here.components)


@asynccontextmanager
async def silent() -> AsyncIterator[str]:
    """The address of a server that accepts requests and never answers."""

    async def taken(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with await asyncio.start_server(taken, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        await client.aclose()


async def test_a_server_that_disappears_during_a_call_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(waiting, "PROBE_SECONDS", 0.1)

    def instance(id: str, url: str) -> Instance:
        return Instance(id=id * 12, name="policy_model", kind="responses_api_models", implementation="x", url=url)

    async with silent() as lost, listening(model_server.create_app(Told("yes"))) as port:
        there = [instance("a", lost)]

        async def look() -> HeadSnapshot:
            return HeadSnapshot(instances=list(there))

        instances = InstanceDirectory(look, max_age=0)
        asked = RemoteModel("policy_model", instances, seconds=60, watch=0.05, wait_seconds=0.2)
        calling = asyncio.ensure_future(said(asked))
        await asyncio.sleep(0.3)
        assert not calling.done()
        there[:] = [instance("b", f"http://127.0.0.1:{port}")]
        async with asyncio.timeout(10):
            assert await calling == "yes"
        there[:] = [instance("a", lost)]
        await asyncio.sleep(0.11)
        await instances.renew()
        calling = asyncio.ensure_future(said(asked))
        await asyncio.sleep(0.2)
        there.clear()
        async with asyncio.timeout(10):
            with pytest.raises(Failed, match="no model server 'policy_model' is registered"):
                await calling
