"""The router of model replicas, with real servers that stop and start again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import signal
import ssl
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from aiohttp import web

from gymsdk import Failed, model, responses, router
from gymsdk.router import STICKY_KEY, get_sticky_key
from gymsdk.testing.endpoint import serve
from gymsdk.types import Item, Model

HI = {"role": "user", "content": "hi"}
QUICK = {"wait": 0.001, "retries": 1}
OPENSSL = shutil.which("openssl")


class Server:
    """A server that responds with its number; tests can set another *status* or make it hang."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.status = 200
        self.text: str | None = None
        self.headers: dict[str, str] = {}
        self.delay = 0.0
        self.request_count = 0
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
        self.request_count += 1
        if self.status == 0:
            await asyncio.sleep(30)
        await asyncio.sleep(self.delay)
        if self.text is not None:
            return web.Response(text=self.text, status=self.status, headers=self.headers)
        message = {"role": "assistant", "content": str(self.number)}
        body = {"model": "m", "choices": [{"message": message, "finish_reason": "stop"}]}
        content = body if self.status == 200 else {"error": "no"}
        return web.json_response(content, status=self.status, headers=self.headers)


@asynccontextmanager
async def three(**options: object) -> AsyncIterator[tuple[Model, list[Server]]]:
    servers = [Server(number) for number in range(3)]
    for server in servers:
        await server.begin()
    try:
        yield model("endpoint/m", base_url=[each.url for each in servers], **(QUICK | options)), servers
    finally:
        for server in servers:
            await server.end()


async def ask(policy: Model, name: str) -> int:
    """Send a request of the conversation *name*; return the number of the server that responds."""
    response = await policy.respond({"input": [HI]}, episode=SimpleNamespace(id=name))
    return int(response["output"][0]["content"][0]["text"])


async def find_servers(policy: Model, count: int = 30) -> dict[str, int]:
    return {name: await ask(policy, name) for name in map(str, range(count))}


async def _conversation_on(policy: Model, number: int) -> str:
    """Return a conversation that belongs to the server with this *number*."""
    return next(name for name, home in (await find_servers(policy)).items() if home == number)


@pytest.fixture
def _brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "FIRST_PAUSE_SECONDS", 0.05)


async def test_a_conversation_stays_on_its_server_and_conversations_are_balanced() -> None:
    async with three() as (policy, _):
        first, again = await find_servers(policy), await find_servers(policy)
    assert first == again
    assert min(Counter(first.values()).values()) >= 3


async def test_only_the_conversations_of_a_dead_server_move() -> None:
    async with three() as (policy, servers):
        before = await find_servers(policy)
        await servers[1].end()
        after = await find_servers(policy)
    assert {name for name in before if before[name] != after[name]} == {name for name in before if before[name] == 1}


async def test_a_dead_server_costs_one_attempt_and_not_one_per_call(caplog: pytest.LogCaptureFixture) -> None:
    async with three() as (policy, servers):
        servers[1].status = 503
        with caplog.at_level(logging.WARNING):
            await find_servers(policy)
    assert servers[1].request_count == 1
    assert [record.message.split(";")[0] for record in caplog.records] == [
        f"{servers[1].url[7:-3]} answered 503",
    ]


@pytest.mark.usefixtures("_brief")
async def test_a_server_that_restarts_gets_its_conversations_back(caplog: pytest.LogCaptureFixture) -> None:
    async with three() as (policy, servers):
        before = await find_servers(policy)
        port = int(servers[1].url.split(":")[2].partition("/")[0])
        await servers[1].end()
        with caplog.at_level(logging.WARNING):
            await find_servers(policy)
            await servers[1].begin(port)
            await asyncio.sleep(0.1)
            assert await find_servers(policy) == before
    assert ["its conversations go" in text or "gets its conversations back" in text for text in caplog.messages] == [
        True,
        True,
    ]


@pytest.mark.usefixtures("_brief")
async def test_a_server_that_may_have_recovered_is_tried_by_one_call_at_a_time() -> None:
    async with three(timeout=10) as (policy, servers):
        names = [name for name, home in (await find_servers(policy)).items() if home == 1]
        servers[1].status = 503
        await ask(policy, names[0])
        await asyncio.sleep(0.1)
        servers[1].status, servers[1].request_count = 0, 0
        trying = asyncio.create_task(ask(policy, names[0]))
        await asyncio.sleep(0.1)
        assert {await ask(policy, name) for name in names} <= {0, 2}
        trying.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await trying
        assert servers[1].request_count == 1


@pytest.mark.usefixtures("_brief")
async def test_a_call_that_hung_before_the_loss_does_not_block_recovery() -> None:
    async with three(timeout=10) as (policy, servers):
        names = [name for name, home in (await find_servers(policy)).items() if home == 1]
        servers[1].status = 0
        hanging = asyncio.create_task(ask(policy, names[0]))
        await asyncio.sleep(0.1)
        servers[1].status = 503
        assert await ask(policy, names[0]) != 1
        servers[1].status = 200
        await asyncio.sleep(0.1)
        assert await ask(policy, names[0]) == 1
        hanging.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await hanging


@pytest.mark.parametrize("status", [429, 500])
async def test_a_server_error_is_retried_elsewhere_and_removes_no_server(status: int) -> None:
    async with three() as (policy, servers):
        names = [name for name, home in (await find_servers(policy)).items() if home == 1]
        servers[1].status, servers[1].request_count = status, 0
        assert {await ask(policy, name) for name in names} <= {0, 2}
    assert servers[1].request_count == len(names)


async def test_a_server_whose_first_trial_fails_gets_its_conversations_back_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(router, "FIRST_PAUSE_SECONDS", 0.05)
    async with three() as (policy, servers):
        name = await _conversation_on(policy, 1)
        servers[1].status, servers[1].request_count = 503, 0
        await ask(policy, name)
        await asyncio.sleep(0.1)
        assert await ask(policy, name) != 1
        assert servers[1].request_count == 2
        servers[1].status = 200
        await asyncio.sleep(0.2)
        assert await ask(policy, name) == 1


async def test_a_call_that_timed_out_elsewhere_removes_no_server() -> None:
    async with three(timeout=1) as (policy, servers):
        before = await find_servers(policy)
        name = await _conversation_on(policy, 1)
        for server in servers:
            server.status, server.request_count = 0, 0
        servers[1].status, servers[1].delay = 500, 0.6
        with pytest.raises(Failed, match="within 1 s"):
            await ask(policy, name)
        assert sorted(server.request_count for server in servers) == [0, 1, 1]
        for server in servers:
            server.status, server.delay = 200, 0.0
        assert await find_servers(policy) == before


STRAYS = [(401, None), (403, None), (404, None), (200, "<html>"), (200, "[]"), (200, '{"choices": ['), (200, "")]


@pytest.mark.parametrize(("status", "text"), STRAYS)
async def test_an_error_of_only_one_server_is_attributed_to_the_server(
    status: int, text: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    async with three() as (policy, servers):
        servers[1].status, servers[1].text = status, text
        with caplog.at_level(logging.WARNING):
            assert set((await find_servers(policy)).values()) == {0, 2}
    assert servers[1].request_count == 1
    assert [f"answered {status}" in message for message in caplog.messages] == [True]


@pytest.mark.usefixtures("_brief")
async def test_a_misconfigured_server_gets_its_conversations_back_when_it_recovers() -> None:
    async with three() as (policy, servers):
        before = await find_servers(policy)
        servers[1].status = 404
        assert 1 not in (await find_servers(policy)).values()
        servers[1].status = 200
        await asyncio.sleep(0.2)
        assert await find_servers(policy) == before


@pytest.mark.parametrize(("status", "kind"), [(401, "model_unauthorized"), (404, "model_not_found")])
async def test_an_error_of_all_servers_is_the_outcome_and_removes_no_server(
    status: int, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with three() as (policy, servers):
        before = await find_servers(policy)
        for server in servers:
            server.status, server.request_count = status, 0
        with pytest.raises(Failed, match=f"answered {status}") as caught:
            await ask(policy, "one")
        assert (caught.value.kind, [server.request_count for server in servers]) == (kind, [1, 1, 1])
        for server in servers:
            server.status = 200
        assert await find_servers(policy) == before
    assert not caplog.messages


async def test_a_misconfigured_server_does_not_end_a_call_that_another_server_may_answer() -> None:
    async with three(retries=3, wait=0.2) as (policy, servers):
        servers[0].status, servers[1].status, servers[2].status = 404, 404, 500
        asking = asyncio.create_task(ask(policy, "one"))
        while not servers[2].request_count:  # noqa: ASYNC110 - servers send no notification
            await asyncio.sleep(0.01)
        servers[2].status = 200
        assert await asking == 2


@asynccontextmanager
async def untrusted(folder: Path) -> AsyncIterator[str]:
    """The base URL of a server with an untrusted certificate."""
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    words = [
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-subj",
        "/CN=gym.test",
    ]
    command = [OPENSSL or "", *words, "-keyout", key, "-out", certificate]
    await asyncio.to_thread(subprocess.run, command, check=True, capture_output=True)
    shown = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    shown.load_cert_chain(certificate, key)
    runner = web.AppRunner(web.Application())
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=shown).start()
        yield f"https://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()


@pytest.mark.skipif(OPENSSL is None, reason="no openssl here that could make a certificate")
async def test_an_untrusted_server_is_skipped_unless_all_are_untrusted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with three() as (_, servers), untrusted(tmp_path) as url:
        mixed = model("endpoint/m", base_url=[url, servers[0].url], **QUICK)
        assert set((await find_servers(mixed)).values()) == {0}
        assert ["is not trusted" in message for message in caplog.messages] == [True]
        alone = model("endpoint/m", base_url=[url, url.replace("127.0.0.1", "localhost")], **QUICK)
        with pytest.raises(Failed) as caught:
            await ask(alone, "one")
    assert (caught.value.kind, caught.value.retryable) == ("model_untrusted", False)


async def test_a_server_is_not_called_before_its_retry_after() -> None:
    async with three(retries=3) as (policy, servers):
        name = await _conversation_on(policy, 1)
        for server in servers:
            server.status, server.request_count = 500, 0
        servers[1].status, servers[1].headers = 429, {"Retry-After": "60"}
        with pytest.raises(Failed, match="answered 500"):
            await ask(policy, name)
        assert [server.request_count for server in servers] == [4, 1, 4]
        servers[0].status = servers[2].status = 503
        with pytest.raises(Failed, match="answered 503"):
            await ask(policy, name)
        assert servers[1].request_count == 1


async def test_if_all_servers_send_retry_after_the_shortest_wait_counts() -> None:
    async with three() as (policy, servers):
        name = await _conversation_on(policy, 1)
        for server, seconds in zip(servers, ("60", "0.3", "60"), strict=True):
            server.status, server.headers, server.request_count = 429, {"Retry-After": seconds}, 0
        clock = asyncio.get_running_loop().time
        asking, began = asyncio.create_task(ask(policy, name)), clock()
        while not all(server.request_count for server in servers):  # noqa: ASYNC110 - servers send no notification
            await asyncio.sleep(0.01)
        servers[1].status = 200
        assert await asking == 1
        assert clock() - began >= 0.25
    assert [server.request_count for server in servers] == [1, 2, 1]


async def test_a_rejected_request_is_final_on_any_server() -> None:
    async with three() as (policy, servers):
        for server in servers:
            server.status = 400
        with pytest.raises(Failed, match="answered 400"):
            await ask(policy, "one")
    assert sum(server.request_count for server in servers) == 1


async def test_if_all_servers_are_lost_all_are_tried_and_the_failure_reports_it() -> None:
    async with three() as (policy, servers):
        for server in servers:
            server.status = 503
        for _ in range(2):
            with pytest.raises(Failed, match="answered 503") as caught:
                await ask(policy, "one")
    assert (caught.value.kind, caught.value.retryable) == ("model_error", True)
    assert [server.request_count for server in servers] == [4, 4, 4]


async def test_a_hanging_server_is_a_timeout_and_is_removed() -> None:
    async with three(timeout=0.2) as (policy, servers):
        home = await ask(policy, "one")
        servers[home].status = 0
        with pytest.raises(Failed, match=r"within 0\.2 s") as caught:
            await ask(policy, "one")
        assert caught.value.kind == "model_timeout"
        assert await ask(policy, "one") != home


async def test_a_cancelled_call_removes_no_server() -> None:
    async with three() as (policy, servers):
        home = await ask(policy, "one")
        servers[home].status = 0
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await ask(policy, "one")
        servers[home].status = 200
        assert await ask(policy, "one") == home


SERVING = """
import asyncio, sys
from gymsdk import model
from gymsdk.testing import build_app, serve
async def main():
    async with serve(build_app(model("scripted/echo"))) as url:
        print(url, flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""


async def test_a_killed_process_among_three_fails_no_call() -> None:
    processes = [
        await asyncio.create_subprocess_exec(sys.executable, "-c", SERVING, stdout=asyncio.subprocess.PIPE)
        for _ in range(3)
    ]
    try:
        urls = [(await each.stdout.readline()).decode().strip() for each in processes if each.stdout]
        policy = model("vllm/policy", base_url=urls, wait=0.01)
        async with asyncio.TaskGroup() as group:
            calls = [group.create_task(_later(policy, number)) for number in range(60)]
            await asyncio.sleep(0.1)
            processes[0].send_signal(signal.SIGKILL)
        assert {call.result()["output"][0]["content"][0]["text"] for call in calls} == set(map(str, range(60)))
    finally:
        for each in processes:
            with contextlib.suppress(ProcessLookupError):
                each.kill()
            await each.communicate()


async def _later(policy: Model, number: int) -> Item:
    await asyncio.sleep(number / 200)
    return await policy.respond({"input": str(number)})


def test_a_conversation_is_identified_by_its_opening_in_any_format() -> None:
    words = [{"type": "input_text", "text": "hi"}]
    later = [{"type": "message", "role": "user", "content": words}, responses.build_message("yo"), HI]
    assert (
        get_sticky_key({"input": "hi"}, None)
        == get_sticky_key({"input": [HI]}, None)
        == get_sticky_key({"input": later}, None)
    )
    assert get_sticky_key({"input": "hi"}, None) != get_sticky_key({"input": "hi", "instructions": "be brief"}, None)


def test_a_conversation_is_identified_by_its_episode_or_its_opening() -> None:
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
