"""The claims of a worker last as long as what they protect: a rollout, its response, or a session."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

import pytest

from gymsdk import Task
from gymsdk.cluster.directory import InstanceDirectory, nodes_fetcher
from gymsdk.cluster.forwarding import OtherInstances
from gymsdk.cluster.shared_memory import ENTRY, SharedMemory, _compute_digest, create_shared_file
from gymsdk.cluster.workers import Ownership
from gymsdk.edge.limits import IdempotencyCache
from gymsdk.servers import agent, resources
from gymsdk.servers.requests import digest_row

from .app_helpers import app_client
from .engines import SlowModel
from .nodes import wait_until

SECONDS = 1.0
"""How long the claims of these tests last."""

TTL = 2.4
"""How long the sessions of these tests last, and the claims on their ids."""

OTHER_PROCESS = 1
"""A process that is no worker."""


@pytest.fixture
def memory():
    file = create_shared_file()
    yield SharedMemory(file)
    os.close(file)


@pytest.fixture
def owners(memory):
    directory = InstanceDirectory(nodes_fetcher("http://127.0.0.1:9"))
    others = OtherInstances("one", "responses_api_agents", "no-instance", directory)
    return Ownership("one", os.getpid(), memory, others, seconds=SECONDS)


def is_owned(memory: SharedMemory, key: str) -> bool:
    """Return whether this process owns *key*; a claim that has expired is lost by the question."""
    return memory.claim(f"one\0{key}", OTHER_PROCESS, 0) == os.getpid()


def get_expiry(memory: SharedMemory, key: str) -> float:
    """Return when the claim on *key* expires."""
    digest = _compute_digest(f"one\0{key}")
    known, expires, owner = ENTRY.unpack_from(memory._memory, memory._memory.find(digest))
    assert (known, owner) == (digest, os.getpid())
    return float(expires)


async def wait_for_renewal(memory: SharedMemory, key: str) -> None:
    """Wait until the claim on *key* is renewed."""
    before = get_expiry(memory, key)
    async with asyncio.timeout(30):
        while get_expiry(memory, key) == before:  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.02)


async def check_that_nothing_renews(memory: SharedMemory, key: str, seconds: float = SECONDS) -> None:
    """Check that the claim on *key* expires."""
    before = get_expiry(memory, key)
    await asyncio.sleep(1.1 * seconds)
    assert get_expiry(memory, key) == before
    assert not is_owned(memory, key)


def build_row(prompt: str, rollout: str) -> dict[str, Any]:
    return Task.ask(prompt, initial_count=1, expected_count=3).row() | {"_ng_rollout_id": rollout}


async def test_a_claim_lasts_while_the_rollout_plays_and_as_long_as_its_response_from_then_on(counter, memory, owners):
    model, row = SlowModel(), build_row("slow", "long")
    key = f"long:{digest_row(row)}"
    async with app_client(agent.create_app(counter(), model, owners=owners)) as client:
        playing = asyncio.ensure_future(client.post("/run", json=row))
        await wait_until(lambda: model.started)
        for _ in range(3):
            await wait_for_renewal(memory, key)
        ends_at = time.monotonic()
        model.released.set()
        assert (await playing).status_code == 200
        assert get_expiry(memory, key) >= ends_at + SECONDS
        # A repeated request renews the claim.
        repeated_at = time.monotonic()
        assert (await client.post("/run", json=row)).content == (await playing).content
        assert get_expiry(memory, key) >= repeated_at + SECONDS
        await check_that_nothing_renews(memory, key)


async def test_the_end_of_a_cancelled_operation_does_not_release_the_next_one(memory, owners):
    cache, may_clean_up, has_ended, may_end = IdempotencyCache(claims=owners), *(asyncio.Event() for _ in range(3))

    async def work_until_cancelled() -> bytes:
        try:
            await asyncio.sleep(60)
        finally:
            await may_clean_up.wait()
            has_ended.set()
        return b""

    async def work() -> bytes:
        await may_end.wait()
        return b"done"

    first = asyncio.ensure_future(cache("key", work_until_cancelled))
    await asyncio.sleep(0.01)
    first.cancel()
    await asyncio.wait({first})
    # `Ownership.forward` claims the id before each operation.
    assert memory.claim("one\0key", os.getpid(), SECONDS) == os.getpid()
    second = asyncio.ensure_future(cache("key", work))
    await asyncio.sleep(0.01)
    may_clean_up.set()
    await has_ended.wait()
    await asyncio.sleep(0.01)
    assert is_owned(memory, "key")
    may_end.set()
    assert await second == b"done"


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/seed_session", "/v1/agent_sessions"])
async def test_a_claim_lasts_while_a_session_is_open(counter, memory, owners, path):
    ids = {"episode_id": {"rollout_id": "r", "attempt": 0}}
    task = {"task_id": {"taskset": "t", "task_id": "1"}}
    if path == "/seed_session":
        app = resources.create_app(counter(), owners=owners, ttl=TTL)
        ids |= {"resources_session_id": "named"}
        body, close_path = {**ids, **task, "task_data": {"initial_count": 3}}, "/close_session"
    else:
        app = agent.create_app(counter(), SlowModel(), owners=owners, ttl=TTL)
        ids |= {"agent_session_id": "named"}
        body, close_path = {**ids, **task}, f"{path}/close"
    async with app_client(app) as client:
        assert (await client.post(path, json=body)).status_code == 200
        for _ in range(2):
            await wait_for_renewal(memory, "session\0named")
        closes_at = time.monotonic()
        assert (await client.post(close_path, json=ids)).status_code == 200
        assert get_expiry(memory, "session\0named") >= closes_at + TTL
        await check_that_nothing_renews(memory, "session\0named", TTL)
