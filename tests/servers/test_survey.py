"""The status of real servers: killed, missing, slow, NeMo Gym's, and none at all."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.responses import JSONResponse

from gymsdk import Failed
from gymsdk.deploy.node import Node
from gymsdk.deploy.process import serve
from gymsdk.http import client
from gymsdk.observability import status as survey_module
from gymsdk.observability.status import LostNodeStatus, fetch_status
from gymsdk.servers.reports import Exit
from gymsdk.servers.service import Service

from .nodes import free, heading, listening, noded, process, until

LAMP = Service(name="lamp", kind="resources_servers", implementation="lamp", port=9)


@pytest.fixture(autouse=True)
async def closed():
    yield
    await client.aclose()


async def told(*words: object) -> tuple[int, str, str]:
    """Run `gymsdk status`; return its exit code and its output."""
    command = [sys.executable, "-m", "gymsdk", "status", *map(str, words)]
    pipes = {"stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.PIPE}
    running = await asyncio.create_subprocess_exec(*command, **pipes, env=os.environ)
    out, err = await running.communicate()
    return running.returncode or 0, out.decode(), err.decode()


async def test_a_killed_server_is_reported_and_then_missing(installed: Callable[..., Any]):
    installed()
    async with (
        # With a lease this long, the head counts as new however slowly the test runs.
        heading(lease=3600.0) as head,
        noded(Node(head, expected=["sums"])),
        process("sums", head, lease=2.0) as (running, url),
    ):
        assert (await told("--head", head))[0] == 0
        running.send_signal(signal.SIGKILL)
        await running.wait()
        await until(lambda: gone(head))
        code, out, _ = await told("--head", head)
    assert (code, url in out) == (1, False)
    assert "0 of 1 expected servers registered" in out
    assert "this head has just started: running nodes register with it within 10 seconds" in out
    assert "! sums is expected but not registered" in out
    assert re.search(r"! node [0-9a-f]{8} with sums has not been heard from for \d+ s", out)


async def test_a_lost_node_is_reported_until_it_is_back_even_if_another_has_its_servers():
    other = LAMP.model_copy(update={"id": "0" * 12, "port": 10})
    async with heading() as head, noded(Node(head, [other])):
        one, again = Node(head, [LAMP], lease=0.2), Node(head, [LAMP])
        again.id = one.id
        await one.join()
        await until(lambda: _lost(head))
        found = await fetch_status(head)
        assert (found.lost[0].id, found.lost[0].servers, found.is_healthy) == (one.id, ["lamp"], False)
        await again.join()
        assert not await _lost(head)
        await again.leave()
        assert not await _lost(head)


async def _lost(head: str) -> list[LostNodeStatus]:
    return (await fetch_status(head)).lost


async def gone(head: str) -> bool:
    return [each.health for each in (await fetch_status(head)).servers[1:]] == ["missing"]


async def test_a_registered_server_that_does_not_answer_is_marked():
    async with heading() as head, noded(Node(head, [LAMP])):
        [_, lamp] = (await fetch_status(head)).servers
    assert (lamp.health, lamp.wrong, lamp.sessions) == ("connection_error", ["unhealthy"], 0)


async def test_an_exit_is_a_problem_for_a_while():
    for ago, code, wrong in ((5, -9, ["exit"]), (5, 0, []), (5000, 1, [])):
        ended = {"lamp": Exit(code=code, at=time.time() - ago, restarts=3)}
        async with heading() as head, noded(Node(head, expected=["lamp"], exits=lambda ended=ended: ended)):
            found = await fetch_status(head)
        assert found.servers[1].wrong == ["missing", *wrong]


async def test_an_exit_belongs_to_the_instance_whose_supervisor_reports_it():
    ended, both = {"lamp": Exit(code=-9, at=time.time(), pid=1)}, {"supervisor": "s"}
    other = LAMP.model_copy(update={"id": "0" * 12, "port": 10})
    async with (
        heading() as head,
        noded(Node(head, exits=lambda: ended, **both)),
        noded(Node(head, [LAMP], **both)) as again,
        noded(Node(head, [other])),
    ):
        assert [each.exit_code for each in (await fetch_status(head)).servers[1:]] == [-9, None]
        # Another instance represents the name until the ended one is back.
        await again.leave()
        assert [each.exit_code for each in (await fetch_status(head)).servers[1:]] == [-9]


async def test_the_heads_own_exit_is_reported():
    ended = {"head": Exit(code=-9, at=time.time(), restarts=1)}
    async with heading() as head, noded(Node(head, exits=lambda: ended)):
        [row] = (await fetch_status(head)).servers
    assert (row.name, row.exit_code, row.wrong) == ("head", -9, ["exit"])


async def test_a_node_without_servers_is_not_counted():
    async with heading() as head, noded(Node(head, [LAMP])), noded(Node(head, expected=["lamp"])):
        assert (await fetch_status(head)).nodes == 1


async def test_a_server_that_is_not_a_head_is_reported():
    async with listening(FastAPI()) as port:
        with pytest.raises(Failed, match="is not a head: it answered 404"):
            await fetch_status(f"http://127.0.0.1:{port}")


@pytest.mark.parametrize("said", ["no", {}, {"detail": "forbidden"}, {"instances": "none"}, []])
@pytest.mark.parametrize(
    ("status", "sentence"),
    [(200, "is not a head: it answered 200"), (403, "is not a head: it answered 403"), (503, "it answered 503")],
)
async def test_a_head_without_a_list_of_servers_is_not_healthy(status: int, sentence: str, said: object):
    made = FastAPI()
    made.add_api_route("/nodes", lambda: JSONResponse(said, status), methods=["GET"])
    async with listening(made) as port:
        with pytest.raises(Failed, match=sentence):
            await fetch_status(f"http://127.0.0.1:{port}")


@pytest.mark.parametrize(("status", "said"), [(200, "no"), (200, ["no"]), (200, {}), (403, []), (503, [])])
async def test_a_nemo_gym_head_must_return_its_list(status: int, said: object):
    made = FastAPI()
    made.add_api_route("/server_instances", lambda: JSONResponse(said, status), methods=["GET"])
    async with listening(made) as port:
        with pytest.raises(Failed, match=f"it answered {status}"):
            await fetch_status(f"http://127.0.0.1:{port}")


@pytest.mark.parametrize(("status", "health"), [(404, "success"), (503, "unknown_error")])
async def test_a_heads_health_is_whether_it_answers(status: int, health: str):
    made = FastAPI()
    made.add_api_route("/nodes", lambda: {"instances": []}, methods=["GET"])
    made.add_api_route("/metrics", lambda: JSONResponse({}, status), methods=["GET"])
    async with listening(made) as port:
        found = await fetch_status(f"http://127.0.0.1:{port}")
    assert (found.servers[0].health, found.is_healthy) == (health, health == "success")


async def test_a_head_that_does_not_return_its_metrics_in_time_is_not_healthy(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(survey_module, "REQUEST_SECONDS", 3.0)
    made = FastAPI()

    async def hang() -> None:
        await asyncio.sleep(3600)

    made.add_api_route("/nodes", lambda: {"instances": []}, methods=["GET"])
    made.add_api_route("/metrics", hang, methods=["GET"])
    async with listening(made) as port:
        found = await fetch_status(f"http://127.0.0.1:{port}")
    assert (found.servers[0].health, found.servers[0].wrong, found.is_healthy) == ("timeout", ["unhealthy"], False)


async def test_a_status_does_not_contain_credentials():
    async with heading() as head:
        found = await fetch_status(head.replace("http://", "http://me:hush@"))
    with pytest.raises(Failed) as caught:
        await fetch_status(f"http://me:hush@127.0.0.1:{free()}")
    assert "hush" not in f"{found.model_dump_json()} {caught.value}"


async def test_a_nemo_gym_head_is_asked_for_its_list(installed: Callable[..., Any]):
    installed()
    async with serve(["sums"]) as running:
        [there] = (
            each for each in (await client.get(f"{running.head_url}/server_instances")).json() if each["name"] == "sums"
        )
        made = FastAPI()
        made.add_api_route("/server_instances", lambda: [there], methods=["GET"])
        async with listening(made) as port:
            found = await fetch_status(f"http://127.0.0.1:{port}")
    assert (found.round_trip_by, found.registered, found.is_healthy) == ("command", 1, True)
    assert found.servers[1].round_trip is not None
