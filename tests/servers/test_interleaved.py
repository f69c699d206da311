"""Sessions interleaved at random over HTTP give the results of sequential ones, and leak nothing."""

from __future__ import annotations

import asyncio
import gc
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from fastapi import FastAPI

from gymsdk import Environment, Task
from gymsdk.servers import resources
from gymsdk.servers.sessions import Session

from .nodes import metric
from .walks import Walk, alone, interleaved, recorded

NAMES = ("math", "multineedle", "tool_call")
NOISE = 12 * 2**20
"""Bytes that a process may have more after one round of sessions than after the one before."""


@pytest.fixture(scope="module")
def served() -> Iterator[dict[str, Any]]:
    """The servers of three environments in a separate process."""
    words = [sys.executable, "-m", "gymsdk", "serve", *NAMES, "--port", "0", "--json"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        yield orjson.loads(process.stdout.readline())
        process.terminate()
        _, log = process.communicate(timeout=30)
    assert b"Traceback" not in log, log.decode()


@asynccontextmanager
async def asking() -> AsyncIterator[aiohttp.ClientSession]:
    """A client with no jar, which waits for nothing longer than a while."""
    async with aiohttp.ClientSession(
        cookie_jar=aiohttp.DummyCookieJar(), timeout=aiohttp.ClientTimeout(total=60)
    ) as http:
        yield http


def urls(served: dict[str, Any]) -> dict[str, str]:
    return {name: served["servers"][name]["url"] for name in NAMES}


async def still_open(http: aiohttp.ClientSession, url: str) -> int:
    async with http.get(f"{url}/metrics") as answer:
        found = metric(await answer.text(), "sessions_open")
    assert found is not None, "a resources server tells how many are open"
    return int(found)


async def walks_of(each: int) -> list[Walk]:
    return [walk for name in NAMES for walk in await recorded(name, each)]


def memory(pid: int) -> int:
    found = re.search(r"^VmRSS:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found, "a process of this system tells its size"
    return int(found[1]) * 1024


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("each", [20, pytest.param(334, marks=pytest.mark.slow)])
async def test_interleaved_sessions_give_the_results_of_sequential_ones(served: dict[str, Any], each: int) -> None:
    walks = await walks_of(each)
    async with asking() as http:
        one_by_one = await alone(http, urls(served), walks)
        mixed = await interleaved(http, urls(served), walks)
        assert mixed == one_by_one
        assert [outputs for outputs, _ in mixed] == [walk.outputs for walk in walks]
        assert [verdict["reward"] for _, verdict in mixed] == [walk.reward for walk in walks]
        assert [await still_open(http, url) for url in urls(served).values()] == [0, 0, 0]


async def test_the_recorded_walks_score_differently_and_call_tools() -> None:
    walks = await walks_of(6)
    assert {walk.reward > 0.5 for walk in walks} == {True, False}
    assert {walk.environment for walk in walks if walk.calls} == {"multineedle", "tool_call"}


@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_rounds_of_sessions_do_not_grow_the_process(served: dict[str, Any]) -> None:
    walks = await walks_of(334)
    sizes = []
    async with asking() as http:
        for number in range(4):
            await interleaved(http, urls(served), walks, seed=number)
            sizes.append(memory(served["pid"]))
    # The first rounds fill caches once: code, arenas, the record of closed names.
    assert sizes[3] - sizes[1] < NOISE, sizes


@pytest.mark.parametrize("ttl", [1.0, 600.0])
async def test_closed_and_expired_sessions_are_released_once(
    counter: Callable[..., Environment],
    listening: Callable[[FastAPI], AbstractAsyncContextManager[str]],
    ttl: float,
) -> None:
    found, count = counter(), 40
    rows = [Task.ask("add", initial_count=number + 100, expected_count=0).row() for number in range(count)]
    async with listening(resources.create_app(found, ttl=ttl)) as url, asking() as http:
        names = [await _seeded(http, url, f"session-{number}", row) for number, row in enumerate(rows)]
        assert ttl == 1 or await still_open(http, url) == count
        # With a short time to live, sessions expire; with a long one, each is closed twice at the same time.
        await asyncio.gather(*(_closed(http, url, name) for name in names for _ in range(2) if ttl > 1))
        async with asyncio.timeout(20):
            while await still_open(http, url):  # noqa: ASYNC110  # a gauge has no event
                await asyncio.sleep(0.05)
        closed = sys.modules["counter_env"].CLOSED
        assert sorted(closed) == [row["initial_count"] for row in rows]
        async with asyncio.timeout(20):
            while _remaining():  # noqa: ASYNC110  # nor does garbage collection
                await asyncio.sleep(0.05)


def _remaining() -> list[Session]:
    gc.collect()
    return [each for each in gc.get_objects() if isinstance(each, Session)]


async def _seeded(http: aiohttp.ClientSession, url: str, name: str, row: dict[str, Any]) -> str:
    ids = {"episode_id": {"rollout_id": name, "attempt": 0}, "task_id": {"taskset": "counter", "task_id": name}}
    body = {"resources_session_id": name, **ids, "task_data": row}
    async with http.post(f"{url}/seed_session", json=body) as answer:
        assert answer.status == 200, await answer.text()
    return name


async def _closed(http: aiohttp.ClientSession, url: str, name: str) -> None:
    async with http.post(f"{url}/close_session", json={"resources_session_id": name}) as answer:
        assert answer.status == 200, await answer.text()
