"""The outbound client against real servers on loopback."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from itertools import chain, repeat

import pytest
from aiohttp import web
from pydantic import SecretStr

from gymsdk.errors import Failed
from gymsdk.http import backoff, client

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
QUICK = client.Retry(times=3, first=0.001, longest=0.01)
KEY = SecretStr("sk-very-secret")


CLOSED, HALF = 0, -1
"""Instead of a status: the connection is closed before the response, or in the middle of it."""


@asynccontextmanager
async def serving(handler: Handler, port: int = 0) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    bound = socket.create_server(("127.0.0.1", port))
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.SockSite(runner, bound, backlog=4096).start()
    yield f"http://127.0.0.1:{bound.getsockname()[1]}/v1/x"
    await runner.cleanup()


class Scene:
    """A server that returns its responses in order, repeats the last response, and records the requests."""

    def __init__(self, *answers: tuple[int, str, dict[str, str]]) -> None:
        self._answers = chain(answers, repeat(answers[-1]))
        self.seen: list[web.Request] = []
        self.bodies: list[bytes] = []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.seen.append(request)
        self.bodies.append(await request.read())
        status, text, headers = next(self._answers)
        if status <= 0:
            response = web.StreamResponse(headers={"Content-Length": "1000"})
            if status == HALF:
                await response.prepare(request)
                await response.write(b'{"ok"')
            assert request.transport is not None
            request.transport.abort()
            return response
        return web.Response(status=status, text=text, headers=headers)


OK = (200, '{"ok": true}', {})
BUSY = (503, "busy", {})
CUT = (CLOSED, "", {})


async def failure(scene: Scene, **options: object) -> Failed:
    async with serving(scene.answer) as url:
        with pytest.raises(Failed) as caught:
            (await client.post(url, {}, **({"retry": QUICK} | options))).json()
    return caught.value


async def test_the_body_and_the_key_arrive_and_the_response_is_parsed() -> None:
    scene = Scene(OK)
    async with serving(scene.answer) as url:
        answer = await client.post(url, {"a": "é"}, key=KEY, headers={"X-Mine": "1"}, retry=client.DEFAULT_RETRY)
    assert (answer.json(), scene.bodies) == ({"ok": True}, ['{"a":"é"}'.encode()])
    assert "very-secret" not in repr(answer)
    expected = {"Authorization": "Bearer sk-very-secret", "X-Mine": "1", "Content-Type": "application/json"}
    assert {name: scene.seen[0].headers[name] for name in expected} == expected


@pytest.mark.parametrize("status", [CLOSED, HALF, 408, 409, 429, 500, 520])
async def test_closed_connections_and_temporary_errors_are_retried(status: int) -> None:
    scene = Scene((status, "later", {}), (status, "later", {}), OK)
    async with serving(scene.answer) as url:
        assert (await client.post(url, {}, retry=QUICK)).json() == {"ok": True}
        assert (await client.get(url, retry=QUICK)).json() == {"ok": True}
    assert [request.method for request in scene.seen] == ["POST"] * 3 + ["GET"]


@pytest.mark.parametrize(
    ("status", "kind"),
    [(401, "model_unauthorized"), (403, "model_unauthorized"), (404, "model_not_found")]
    + [(status, "model_refused") for status in (307, 400, 405, 413, 422)],
)
async def test_a_rejection_and_a_redirect_are_final(status: int, kind: str) -> None:
    scene = Scene((status, "no", {"Location": "http://127.0.0.1:1/", "Retry-After": "5"}))
    error = await failure(scene)
    assert (error.kind, error.retryable, error.retry_after, len(scene.seen)) == (kind, False, None, 1)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [(BUSY, "model_error"), ((429, "slow down", {}), "model_rate_limited"), (CUT, "model_unreachable")],
)
async def test_retries_are_bounded(answer: tuple[int, str, dict[str, str]], kind: str) -> None:
    scene = Scene(answer)
    error = await failure(scene)
    assert (error.kind, error.retryable, len(scene.seen)) == (kind, True, 1 + QUICK.times)


async def test_retry_after_is_honored() -> None:
    loop = asyncio.get_running_loop()
    async with serving(Scene((429, "", {"Retry-After": "0.2"}), OK).answer) as url:
        start = loop.time()
        await client.post(url, {}, retry=QUICK)
    assert loop.time() - start >= 0.2


def test_retry_after_may_be_a_date() -> None:
    date = format_datetime(datetime.now(UTC) + timedelta(seconds=60), usegmt=True)
    assert backoff.parse_retry_after(date) == pytest.approx(59, abs=2)
    assert backoff.parse_retry_after("Wed, 21 Oct 2015 07:28:00 GMT") == 0


@pytest.mark.parametrize("header", ["soon", "", "Wed, 99 Nov 2000", "-5", "nan", "inf"])
async def test_an_invalid_retry_after_is_ignored(header: str) -> None:
    async with serving(Scene((503, "", {"Retry-After": header}), OK).answer) as url:
        assert (await client.post(url, {}, retry=QUICK)).status == 200


async def test_a_retry_after_beyond_the_deadline_is_not_waited_for() -> None:
    scene = Scene((429, "an hour", {"Retry-After": "3600"}))
    error = await failure(scene, timeout=60.0)
    assert (error.kind, error.retry_after, len(scene.seen)) == ("model_rate_limited", 3600.0, 1)
    # Neither is a pause of the client's own.
    scene = Scene(BUSY)
    error = await failure(scene, timeout=60.0, retry=client.Retry(times=9, first=600, longest=600))
    assert (error.kind, len(scene.seen)) == ("model_error", 1)


async def test_a_request_to_a_silent_server_ends_at_the_deadline() -> None:
    async def silent(_: web.Request) -> web.StreamResponse:
        await asyncio.sleep(30)
        return web.Response()

    async with serving(silent) as url:
        with pytest.raises(Failed, match=r"did not answer within 0\.05 s; check the server's log") as caught:
            await client.post(url, {}, timeout=0.05, retry=client.DEFAULT_RETRY)
    assert (caught.value.kind, caught.value.retryable) == ("model_timeout", True)


async def test_a_response_that_is_not_json_is_a_bad_answer() -> None:
    error = await failure(Scene((200, "<html>hello</html>", {})))
    assert (error.kind, "<html>hello" in str(error)) == ("model_bad_answer", True)
    page = await failure(Scene((200, "<!doctype html><title>Welcome</title>", {})))
    assert "a web page: check the base URL" in str(page)
    assert not page.retryable


async def test_a_message_names_host_status_and_the_beginning_of_the_body() -> None:
    error = await failure(Scene((400, "because" + "x" * 1000, {})))
    assert "127.0.0.1:" in str(error)
    assert "400: because" in str(error)
    assert len(str(error)) < 300


async def test_no_message_contains_the_key_or_a_secret_header() -> None:
    error = await failure(Scene((401, f"wrong key {KEY.get_secret_value()}", {})), key=KEY)
    assert "check the API key" in str(error)
    assert "very-secret" not in str(error)
    headers = {"X-Team": SecretStr("hush")}
    error = await failure(Scene((400, "what is hush?", {})), headers=headers)
    assert str(error).endswith("what is ***?")


async def test_a_cancelled_call_closes_its_connection() -> None:
    closed = asyncio.Event()

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # After the request, the client sends nothing and closes the connection.
        await reader.readuntil(b"{}")
        await reader.read()
        closed.set()
        writer.close()

    server = await asyncio.start_server(listen, "127.0.0.1", 0)
    async with server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await client.post(url, {}, retry=client.DEFAULT_RETRY)
        async with asyncio.timeout(10):
            await closed.wait()


async def test_cookies_are_not_kept() -> None:
    scene = Scene((200, "{}", {"Set-Cookie": "session=1; Path=/"}))
    async with serving(scene.answer) as url:
        await client.post(url, {}, retry=client.DEFAULT_RETRY)
        await client.post(url, {}, retry=client.DEFAULT_RETRY)
    assert "Cookie" not in scene.seen[1].headers


async def test_a_body_that_cannot_be_json_fails_only_its_own_call() -> None:
    with pytest.raises(Failed, match="cannot be written as JSON") as caught:
        await client.post("http://127.0.0.1:1", {"text": object()}, retry=client.DEFAULT_RETRY)
    assert caught.value.kind == "model_bad_request"


async def test_half_a_surrogate_pair_is_sent_as_a_question_mark() -> None:
    scene = Scene(OK)
    async with serving(scene.answer) as url:
        await client.post(url, {"text": "half \ud83d pair"}, retry=client.DEFAULT_RETRY)
    assert scene.bodies == [b'{"text": "half ? pair"}']


@pytest.mark.parametrize(
    "url", ["ftp://hush@somewhere/v1", f"http://{'a' * 300}.x/", "http://user:hush@[/", "http://a:99999999/?key=hush"]
)
async def test_an_invalid_address_is_reported_without_its_secrets(url: str) -> None:
    with pytest.raises(Failed, match=r"is not the URL of a server|cannot reach") as caught:
        await client.post(url, {}, retry=client.Retry(times=0))
    assert "hush" not in str(caught.value)


@pytest.mark.slow
def test_each_loop_has_a_session_that_ends_with_it(recwarn: pytest.WarningsRecorder) -> None:
    async def call() -> None:
        async with serving(Scene(OK).answer) as url:
            await client.post(url, {}, retry=client.DEFAULT_RETRY)

    before = dict(client._sessions._resources)
    asyncio.run(call())
    asyncio.run(call())
    gc.collect()
    assert not recwarn.list
    assert client._sessions._resources == before


async def test_the_session_can_be_closed_and_reopens() -> None:
    async with serving(Scene(OK).answer) as url:
        await client.post(url, {}, retry=client.DEFAULT_RETRY)
        await client.aclose()
        await client.aclose()
        assert (await client.post(url, {}, retry=client.DEFAULT_RETRY)).status == 200


def test_waits_double_up_to_the_limit() -> None:
    retry = client.Retry(first=1, longest=4)
    for attempt, longest in enumerate([1, 2, 4, 4]):
        assert longest / 2 <= retry.get_delay(attempt) <= longest
    assert retry.get_delay(5000) <= 4


@pytest.mark.parametrize(("retry_after", "longest"), [(0.1, 1.1), (4.0, 6.0), (60.0, 64.0)])
def test_a_delay_is_never_shorter_than_retry_after_and_spreads_the_clients(retry_after: float, longest: float) -> None:
    delays = [client.Retry(first=1, longest=4).get_delay(0, retry_after) for _ in range(200)]
    assert retry_after <= min(delays) < max(delays) <= longest
    assert max(delays) - min(delays) > (longest - retry_after) / 2


async def test_a_request_without_retries_is_not_repeated_if_it_may_have_arrived() -> None:
    busy, broken = Scene(BUSY, OK), Scene(CUT, OK)
    async with serving(busy.answer) as url:
        assert (await client.post(url, {}, retry=QUICK, once=True)).status == 503
    async with serving(broken.answer) as url:
        with pytest.raises(Failed, match="broke off its answer"):
            await client.post(url, {}, retry=QUICK, once=True)
    assert (len(busy.seen), len(broken.seen)) == (1, 1)


async def test_a_request_without_retries_is_repeated_if_the_connection_failed() -> None:
    scene = Scene(OK)
    with socket.create_server(("127.0.0.1", 0)) as bound:
        port = bound.getsockname()[1]
    url, patient = f"http://127.0.0.1:{port}/x", client.Retry(times=50, first=0.05, longest=0.05)
    posting = asyncio.ensure_future(client.post(url, {}, retry=patient, once=True))
    await asyncio.sleep(0.1)
    async with serving(scene.answer, port):
        assert (await posting).ok
    assert len(scene.seen) == 1


async def test_response_cookies_and_headers_are_kept_and_bytes_are_sent_unchanged() -> None:
    scene = Scene((200, "{}", {"Set-Cookie": 'a="b=c"; Path=/; HttpOnly', "X-Odd": "1"}))
    async with serving(scene.answer) as url:
        answer = await client.post(url, b'{"a": 1}', headers={"Cookie": "k=v"}, retry=client.DEFAULT_RETRY)
    assert (dict(answer.cookies), answer.headers["x-odd"]) == ({"a": '"b=c"'}, "1")
    assert (scene.bodies, scene.seen[0].headers["Cookie"]) == ([b'{"a": 1}'], "k=v")
