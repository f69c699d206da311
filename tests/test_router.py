"""The router of model replicas, with real servers that stop and start again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from aiohttp import web
from servers.test_tls import OPENSSL, issue_certificate

from gymsdk import Failed, model, responses
from gymsdk.cluster import router
from gymsdk.cluster.router import MAX_CHANGES, STICKY_KEY, Replica, Router, get_sticky_key
from gymsdk.http.backoff import Backoff
from gymsdk.testing.endpoint import serve
from gymsdk.types import Model

HI = {"role": "user", "content": "hi"}
QUICK = {"wait": 0.001, "retries": 1}


class Server:
    """Answers with its own number; with another *status*, or not at all, when told to."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.status = 200
        self.text: str | None = None
        self.headers: dict[str, str] = {}
        self.delay = 0.0
        self.asked = 0
        self.url = ""
        self._stack = AsyncExitStack()

    async def begin(self, port: int = 0) -> None:
        application = web.Application()
        application.router.add_post("/{path:.*}", self._answer)
        self.url = await self._stack.enter_async_context(serve(application, port=port))

    async def end(self) -> None:
        await self._stack.aclose()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        await request.read()
        self.asked += 1
        if self.status < 0 and request.transport:
            request.transport.abort()
        if self.status == 0:
            await asyncio.sleep(30)
        await asyncio.sleep(self.delay)
        if self.text is not None:
            return web.Response(text=self.text, status=self.status, headers=self.headers)
        message = {"role": "assistant", "content": str(self.number)}
        body = {"model": "m", "choices": [{"message": message, "finish_reason": "stop"}]}
        said = body if self.status == 200 else {"error": "no"}
        return web.json_response(said, status=self.status, headers=self.headers)


@asynccontextmanager
async def three(**options: object) -> AsyncIterator[tuple[Model, list[Server]]]:
    servers = [Server(number) for number in range(3)]
    for server in servers:
        await server.begin()
    try:
        yield model("endpoint/m", base_url=[server.url for server in servers], **(QUICK | options)), servers
    finally:
        for server in servers:
            await server.end()


async def ask(policy: Model, name: str) -> int:
    """The number of the server that answered in the conversation *name*."""
    response = await policy.respond({"input": [HI]}, episode=SimpleNamespace(id=name))
    return int(response["output"][0]["content"][0]["text"])


async def homes(policy: Model, count: int = 30) -> dict[str, int]:
    return {name: await ask(policy, name) for name in map(str, range(count))}


async def names_at(policy: Model, number: int) -> list[str]:
    """The conversations of the server with this *number*."""
    return [name for name, home in (await homes(policy)).items() if home == number]


@pytest.fixture
def _brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pause a failed server so briefly that it is surely over after the 0.2 seconds that a test sleeps."""
    monkeypatch.setattr(router, "BREAKER_BACKOFF", Backoff(first=0.05, longest=0.1))


@pytest.fixture
def _lasting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pause a failed server for longer than any test takes."""
    monkeypatch.setattr(router, "BREAKER_BACKOFF", Backoff(first=600.0, longest=600.0))


async def has_been_asked(server: Server, times: int = 1) -> None:
    async with asyncio.timeout(30):
        while server.asked < times:  # noqa: ASYNC110 - servers send no notification
            await asyncio.sleep(0.01)


@pytest.mark.usefixtures("_brief")
async def test_conversations_leave_a_dead_server_alone_and_return_when_it_restarts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with three() as (policy, servers):
        before = await homes(policy)
        assert await homes(policy) == before
        assert {*before.values()} == {0, 1, 2}
        port = int(servers[1].url.split(":")[2].partition("/")[0])
        await servers[1].end()
        with caplog.at_level(logging.WARNING):
            after = await homes(policy)
            await servers[1].begin(port)
            await asyncio.sleep(0.2)
            assert await homes(policy) == before
    assert [name for name in before if before[name] != after[name]] == [name for name in before if before[name] == 1]
    assert ["conversations go" in text or "conversations back" in text for text in caplog.messages] == [True, True]


@pytest.mark.usefixtures("_brief")
async def test_a_server_that_may_be_back_is_tried_by_one_call_at_a_time() -> None:
    async with three(timeout=10) as (policy, servers):
        names = await names_at(policy, 1)
        servers[1].status = 503
        await ask(policy, names[0])
        await asyncio.sleep(0.2)
        servers[1].status, servers[1].asked = 0, 0
        trying = asyncio.create_task(ask(policy, names[0]))
        await has_been_asked(servers[1])
        assert {await ask(policy, name) for name in names} <= {0, 2}
        trying.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await trying
        assert servers[1].asked == 1


@pytest.mark.usefixtures("_brief")
async def test_a_call_that_hangs_since_before_the_loss_keeps_no_server_away() -> None:
    async with three(timeout=10) as (policy, servers):
        names = await names_at(policy, 1)
        servers[1].status, servers[1].asked = 0, 0
        hanging = asyncio.create_task(ask(policy, names[0]))
        await has_been_asked(servers[1])
        servers[1].status = 503
        assert await ask(policy, names[0]) != 1
        servers[1].status = 200
        await asyncio.sleep(0.2)
        assert await ask(policy, names[0]) == 1
        hanging.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await hanging


async def test_a_server_that_breaks_off_its_answers_costs_no_call() -> None:
    async with three() as (policy, servers):
        servers[1].status, servers[1].delay = -1, 0.1
        found = await asyncio.gather(*(ask(policy, str(number)) for number in range(30)))
    assert set(found) == {0, 2}
    assert servers[1].asked > 1


@pytest.mark.parametrize("status", [429, 500])
async def test_an_error_is_got_past_and_loses_no_server(status: int) -> None:
    async with three() as (policy, servers):
        names = await names_at(policy, 1)
        servers[1].status, servers[1].asked = status, 0
        assert {await ask(policy, name) for name in names} <= {0, 2}
    assert servers[1].asked == len(names)


@pytest.mark.usefixtures("_brief")
@pytest.mark.parametrize("status", [503, 404])
async def test_a_server_whose_first_trial_fails_has_its_conversations_back_later(status: int) -> None:
    async with three() as (policy, servers):
        before = await homes(policy)
        name = next(name for name, home in before.items() if home == 1)
        servers[1].status, servers[1].asked = status, 0
        await ask(policy, name)
        await asyncio.sleep(0.2)
        assert await ask(policy, name) != 1
        assert servers[1].asked == 2
        servers[1].status = 200
        await asyncio.sleep(0.2)
        assert await homes(policy) == before


@pytest.mark.slow
async def test_a_call_that_spent_its_time_elsewhere_loses_no_server() -> None:
    async with three(timeout=1) as (policy, servers):
        before = await homes(policy)
        name, *_ = await names_at(policy, 1)
        for server in servers:
            server.status, server.asked = 0, 0
        servers[1].status, servers[1].delay = 500, 0.6
        with pytest.raises(Failed, match="within 1 s"):
            await ask(policy, name)
        assert sorted(server.asked for server in servers) == [0, 1, 1]
        for server in servers:
            server.status, server.delay = 200, 0.0
        assert await homes(policy) == before


STRAYS = [(503, None), (401, None), (404, None), (200, "<html>")]


@pytest.mark.usefixtures("_lasting")
@pytest.mark.parametrize(("status", "text"), STRAYS)
async def test_what_one_server_alone_answers_is_its_own_fault(
    status: int, text: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    async with three() as (policy, servers):
        servers[1].status, servers[1].text = status, text
        with caplog.at_level(logging.WARNING):
            assert set((await homes(policy)).values()) == {0, 2}
    assert servers[1].asked == 1
    assert [f"answered {status}" in message for message in caplog.messages] == [True]


@pytest.mark.parametrize(
    ("status", "kind", "asked"),
    [(401, "model_unauthorized", 3), (404, "model_not_found", 3), (400, "model_refused", 1)],
)
async def test_what_all_servers_answer_is_the_outcome_and_nobodys_fault(
    status: int, kind: str, asked: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with three() as (policy, servers):
        before = await homes(policy)
        for server in servers:
            server.status, server.asked = status, 0
        with pytest.raises(Failed, match=f"answered {status}") as caught:
            await ask(policy, "one")
        assert (caught.value.kind, sum(server.asked for server in servers)) == (kind, asked)
        assert max(server.asked for server in servers) == 1
        for server in servers:
            server.status = 200
        assert await homes(policy) == before
    assert not caplog.messages


async def test_a_server_astray_ends_no_call_that_another_may_answer_later() -> None:
    async with three(retries=3, wait=0.2) as (policy, servers):
        servers[0].status, servers[1].status, servers[2].status = 404, 404, 500
        asking = asyncio.create_task(ask(policy, "one"))
        await has_been_asked(servers[2])
        servers[2].status = 200
        assert await asking == 2


@pytest.mark.skipif(OPENSSL is None, reason="no openssl here that could make a certificate")
async def test_a_server_that_is_not_trusted_is_got_past_unless_none_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tls = issue_certificate(tmp_path, "DNS:gym.test")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tls.certificate, tls.key)
    untrusted = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=context)
    url = f"https://127.0.0.1:{untrusted.sockets[0].getsockname()[1]}/v1"
    async with three() as (_, servers), untrusted:
        mixed = model("endpoint/m", base_url=[url, servers[0].url], **QUICK)
        assert set((await homes(mixed)).values()) == {0}
        assert ["is not trusted" in message for message in caplog.messages] == [True]
        alone = model("endpoint/m", base_url=[url, url.replace("127.0.0.1", "localhost")], **QUICK)
        with pytest.raises(Failed) as caught:
            await ask(alone, "one")
    assert (caught.value.kind, caught.value.retryable) == ("model_untrusted", False)


async def test_a_server_is_not_asked_again_sooner_than_it_said() -> None:
    async with three(retries=3) as (policy, servers):
        name, *_ = await names_at(policy, 1)
        for server in servers:
            server.status, server.asked = 500, 0
        servers[1].status, servers[1].headers = 429, {"Retry-After": "60"}
        with pytest.raises(Failed, match="answered 500"):
            await ask(policy, name)
        assert [server.asked for server in servers] == [4, 1, 4]
        servers[0].status = servers[2].status = 503
        with pytest.raises(Failed, match="answered 503"):
            await ask(policy, name)
        assert servers[1].asked == 1


async def test_where_all_servers_say_when_the_first_of_them_is_waited_for() -> None:
    async with three() as (policy, servers):
        name, *_ = await names_at(policy, 1)
        for server, seconds in zip(servers, ("60", "0.3", "60"), strict=True):
            server.status, server.headers, server.asked = 429, {"Retry-After": seconds}, 0
        clock = asyncio.get_running_loop().time
        asking, began = asyncio.create_task(ask(policy, name)), clock()
        while not all(server.asked for server in servers):  # noqa: ASYNC110 - servers send no notification
            await asyncio.sleep(0.01)
        servers[1].status = 200
        assert await asking == 1
        assert clock() - began >= 0.25
    assert [server.asked for server in servers] == [1, 2, 1]


async def test_where_all_are_lost_all_are_tried_and_the_failure_says_so() -> None:
    async with three() as (policy, servers):
        for server in servers:
            server.status = 503
        for _ in range(2):
            with pytest.raises(Failed, match="answered 503") as caught:
                await ask(policy, "one")
    assert (caught.value.kind, caught.value.retryable) == ("model_error", True)
    assert [server.asked for server in servers] == [4, 4, 4]


async def test_a_server_that_hangs_is_a_timeout_and_a_lost_server() -> None:
    async with three(timeout=0.2) as (policy, servers):
        home = await ask(policy, "one")
        servers[home].status = 0
        with pytest.raises(Failed, match=r"within 0\.2 s") as caught:
            await ask(policy, "one")
        assert caught.value.kind == "model_timeout"
        assert await ask(policy, "one") != home


async def test_a_call_given_up_by_its_caller_loses_no_server() -> None:
    async with three() as (policy, servers):
        home = await ask(policy, "one")
        servers[home].status = 0
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await ask(policy, "one")
        servers[home].status = 200
        assert await ask(policy, "one") == home


def test_a_conversation_is_known_by_its_opening_however_it_is_written() -> None:
    words = [{"type": "input_text", "text": "hi"}]
    later = [{"type": "message", "role": "user", "content": words}, responses.build_message("yo"), HI]
    assert (
        get_sticky_key({"input": "hi"}, None)
        == get_sticky_key({"input": [HI]}, None)
        == get_sticky_key({"input": later}, None)
    )
    assert get_sticky_key({"input": "hi"}, None) != get_sticky_key({"input": "hi", "instructions": "be brief"}, None)


def test_a_conversation_is_known_by_its_episode_or_else_by_what_a_server_knows() -> None:
    token = STICKY_KEY.set("rollout-7")
    try:
        assert get_sticky_key({"input": "hi"}, SimpleNamespace(id="e1")) == "e1"
        assert (
            get_sticky_key({"input": "hi"}, SimpleNamespace(id=""))
            == get_sticky_key({"input": "ho"}, None)
            == "rollout-7"
        )
    finally:
        STICKY_KEY.reset(token)


LOADS = {"a": (3,), "b": (1,), "c": (1,)}


def key_of(found: Replica | None) -> str | None:
    return found and found.key


def test_the_owner_of_a_session_is_chosen_or_else_the_least_loaded_replica_and_equals_take_turns() -> None:
    choice = Router()
    assert [key_of(choice.choose(LOADS)) for _ in range(4)] == ["b", "c", "b", "c"]
    assert key_of(choice.choose(LOADS, exclude={"b", "c"})) == "a"
    assert choice.choose(LOADS, exclude=LOADS) is None
    choice["a"].mark_down()
    assert key_of(choice.choose(LOADS, owner="a")) == "a"
    assert key_of(choice.choose(LOADS, owner="a", exclude={"a"})) in {"b", "c"}
    assert key_of(choice.choose(LOADS, owner="gone")) in {"b", "c"}


def test_one_affinity_has_one_order_of_replicas_and_a_load_comes_before_it() -> None:
    equal = dict.fromkeys("abc", ())
    first = {name: key_of(Router().choose(equal, affinity=name)) for name in map(str, range(30))}
    assert set(first.values()) == {"a", "b", "c"}
    assert first == {name: key_of(Router().choose(equal, affinity=name)) for name in first}
    smaller = {name: key_of(Router().choose(dict.fromkeys("ab", ()), affinity=name)) for name in first}
    assert all(smaller[name] == home for name, home in first.items() if home != "c")
    assert {key_of(Router().choose(LOADS, affinity=name)) for name in first} == {"b", "c"}


def test_a_replica_that_is_down_is_the_last_resort_and_one_that_rests_only_if_all_do() -> None:
    choice, loads = Router(), dict.fromkeys("abc", (0,))
    choice["a"].mark_down()
    choice["b"].rest_until = time.monotonic() + 600
    assert key_of(choice.choose(loads)) == "c"
    assert choice.choose(loads, exclude={"c"}, only_available=True) is None
    assert key_of(choice.choose(loads, exclude={"c"})) == "a"
    assert choice.choose(loads, exclude={"a", "c"}) is None
    assert key_of(choice.choose({"b": (0,)})) == "b"


def test_the_changes_of_a_load_stay_bounded_and_correct_while_the_head_is_silent() -> None:
    replica = Replica("a")
    for _ in range(MAX_CHANGES):
        replica.record_change(1)
        replica.record_change(-1)
    replica.record_change(1)
    assert len(replica.changes) <= MAX_CHANGES
    assert replica.estimate_load(0, 0.0) == 1
    assert replica.estimate_load(1, time.monotonic() + 1) == 1
    replica.record_change(1)
    assert replica.estimate_load(1, 0.0) == 2


def test_work_that_a_report_does_not_count_yet_is_not_forgotten() -> None:
    replica = Replica("a")
    replica.record_change(1)
    for reported, expected in ((0, 1), (1, 1), (3, 3)):
        assert replica.estimate_load(reported, time.monotonic() + 1) == expected
    replica.record_change(-1)
    assert [replica.estimate_load(reported, 0.0) for reported in (0, 1, 3)] == [0, 0, 2]
