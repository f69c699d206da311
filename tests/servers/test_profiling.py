"""Profiling: the CPU time of routes and hooks at `/stats` and in files, and no records without it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from gymsdk import UsageError, tracing
from gymsdk.models.scripted import build
from gymsdk.servers import agent
from gymsdk.tracing import profile_to_directory

from .app_helpers import app_client
from .nodes import serve_app as serve_on_port

BUSY = """
import time

def burn(seconds):
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass

@hookimpl
def tasks(split: Literal["train"], seed):
    yield Task.ask("go")

@hookimpl
async def reset():
    burn(0.01)
    await asyncio.sleep(0.05)
    burn(0.01)
    return Reset()

@hookimpl
def verify():
    burn(0.04)
    return Verdict(reward=1.0)
"""
"""Source of an environment that uses 20 ms of CPU on the loop to reset, and 40 ms in a thread to verify."""

ROW = {"responses_create_params": {"input": "go"}}


pytestmark = pytest.mark.usefixtures("close_client")


def read_dump(folder: Path) -> dict[str, Any]:
    [file] = folder.iterdir()
    return json.loads(file.read_text())


async def test_the_cpu_time_of_hooks_and_routes_is_reported(environment, tmp_path):
    with profile_to_directory(tmp_path):
        app = agent.create_app(environment(BUSY), build("null"), name="busy")
        started = time.process_time()
        async with serve_on_port(app) as port, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            for _ in range(3):
                assert (await client.post("/run", json=ROW)).json()["reward"] == 1.0
            stats = (await client.get("/stats")).json()
        total = (time.process_time() - started) * 1e3
    hooks, run = stats["hooks"]["made"], stats["routes"]["/run"]
    assert {name: hook["calls"] for name, hook in hooks.items()} == {"reset": 3, "verify": 3}
    assert hooks["reset"]["cpu_ms"] == pytest.approx(60, rel=0.3)
    assert hooks["verify"]["cpu_ms"] == pytest.approx(120, rel=0.3)
    assert run["requests"] == 3
    # A route's time contains its hooks' time on the event loop but not in threads; the process's time has both.
    assert 60 <= run["cpu_ms"] <= total - hooks["verify"]["cpu_ms"]
    assert run["cpu_ms"] + hooks["verify"]["cpu_ms"] <= stats["process_cpu_ms"] + 1 <= total + 100
    assert read_dump(tmp_path)["routes"]["/run"]["requests"] == 3


@pytest.mark.slow
async def test_the_cpu_time_of_a_worker_process_belongs_to_its_hook(installed, tmp_path):
    installed("grinding", GRINDING)
    from gymsdk import load
    from gymsdk.workers.offload import get_executor

    # Workers that earlier tests started do not know environments that were installed since.
    get_executor().close()
    with profile_to_directory(tmp_path):
        app = agent.create_app(load("grinding"), build("null"))
        async with (
            serve_on_port(app) as port,
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client,
        ):
            answer = await client.post("/run", json=ROW)
            assert answer.json().get("reward") == 1.0, answer.text
            verify = (await client.get("/stats")).json()["hooks"]["grinding"]["verify"]
    assert 90 <= verify["workers_cpu_ms"] <= 400
    assert verify["cpu_ms"] < 90


GRINDING = """
import time
from typing import Literal
from gymsdk import Task, Verdict, hookimpl, offload

@offload(timeout=20)
def grade():
    until = time.process_time() + 0.1
    while time.process_time() < until:
        pass
    return 1.0

@hookimpl
def tasks(split: Literal["train"], seed):
    yield Task.ask("go")

@hookimpl
async def verify():
    return Verdict(reward=await grade())
"""
"""Source of an environment with a worker that uses 100 ms of CPU to grade."""


async def test_without_profiling_nothing_is_recorded(environment, resources_client):
    async with app_client(agent.create_app(environment(BUSY), build("null"))) as client:
        await client.post("/run", json=ROW)
        assert (await client.get("/stats")).status_code == 404
    async with resources_client() as client:
        assert (await client.get("/stats")).status_code == 404
    assert tracing.profile is None


def test_a_directory_that_cannot_be_created_is_reported(tmp_path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(UsageError, match=r"--profile .*: the folder cannot be created"),
        profile_to_directory(tmp_path / "file"),
    ):
        pass
