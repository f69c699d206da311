"""A dead engine gets a bounded number of requests, whatever lies between the engine and what plays the rollout."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from deployed import run_command, serving

from gymsdk import load, model, play
from gymsdk.http import client

pytestmark = pytest.mark.slow

REQUESTS_OF_A_CALL = 5
"""One request and the default number of retries."""

ATTEMPTS = 2
"""How often a run plays a rollout that fails."""

FAULTS = ["503", "429", "reset"]

ALTERNATING = "alternating"
"""The fault of an engine that answers in turn with nothing and with the status 503."""


class DeadEngine:
    """Answers each POST with a status, or resets its connection, and counts the POSTs; other requests get 404."""

    def __init__(self, fault: str) -> None:
        self.fault = fault
        self.posts = 0
        self.url = ""

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                lines = head.lower().split(b"\r\n")
                length = next((int(line.partition(b":")[2]) for line in lines if line.startswith(b"content-length")), 0)
                await reader.readexactly(length)
                is_post = head.startswith(b"POST")
                self.posts += is_post
                if is_post and self.fault == "reset":
                    # Without lingering, the socket closes with a reset.
                    linger = struct.pack("ii", 1, 0)
                    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                    break
                status = self.fault if self.fault != ALTERNATING else "200" if self.posts % 2 else "503"
                status = status if is_post else "404"
                writer.write(b"HTTP/1.1 %s no\r\ncontent-length: 2\r\n\r\n{}" % status.encode())
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def run_engine(fault: str) -> AsyncIterator[DeadEngine]:
    engine = DeadEngine(fault)
    server = await asyncio.start_server(engine.answer, "127.0.0.1", 0)
    engine.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    try:
        yield engine
    finally:
        server.close()
        await client.aclose()


@pytest.fixture(params=FAULTS)
async def engine(request: pytest.FixtureRequest) -> AsyncIterator[DeadEngine]:
    async with run_engine(request.param) as running:
        yield running


def build_options(*engines: DeadEngine) -> list[object]:
    return ["--model", "endpoint/m", "--base-url", ",".join(engine.url for engine in engines)]


async def roll_out(folder: Path, *options: object) -> None:
    """Play one row with `gymsdk rollout`, which fails."""
    row = ("math", "--split", "validation", "--limit", 1, "--attempts", ATTEMPTS)
    code, output = await run_command("rollout", *row, "--output", folder, *options)
    assert code == 1, output


@pytest.mark.parametrize("engine", [*FAULTS, ALTERNATING], indirect=True)
@pytest.mark.parametrize("provider", ["endpoint", "openai"])
async def test_a_call_in_this_process_sends_one_request_and_its_retries(engine: DeadEngine, provider: str) -> None:
    policy = model(f"{provider}/m", base_url=engine.url, api_key="secret-key", wait=0.01, retries=2)
    async with load("math") as environment:
        rollout = await play(environment, policy, next(environment.tasks("validation")))
    assert rollout.outcome == "failed"
    assert engine.posts == 3


async def test_a_run_in_this_process_repeats_a_call_in_each_attempt_only(engine: DeadEngine, tmp_path: Path) -> None:
    await roll_out(tmp_path / "run", *build_options(engine))
    assert engine.posts == ATTEMPTS * REQUESTS_OF_A_CALL


async def test_servers_between_a_run_and_the_engine_send_no_requests_of_their_own(
    engine: DeadEngine, tmp_path: Path
) -> None:
    async with serving("math", "--port", 0, "--separate", *build_options(engine)) as deployment:
        await roll_out(tmp_path / "run", "--head", deployment.head)
    assert engine.posts == ATTEMPTS * REQUESTS_OF_A_CALL


@pytest.mark.parametrize("faults", [("503", "reset"), ("429", "429")], ids="-".join)
async def test_replicas_share_the_requests_of_a_call_by_rounds(faults: tuple[str, str], tmp_path: Path) -> None:
    async with run_engine(faults[0]) as first, run_engine(faults[1]) as second:
        options = build_options(first, second)
        async with serving("math", "--port", 0, "--separate", *options) as deployment:
            await roll_out(tmp_path / "run", "--head", deployment.head)
    # A replica that is marked down may get fewer.
    assert 0 < max(first.posts, second.posts) <= ATTEMPTS * REQUESTS_OF_A_CALL
