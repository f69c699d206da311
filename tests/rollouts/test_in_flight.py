"""The memory of rollouts in flight: nothing is kept for each of them that they can share or do without."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

PROGRAM = """
import asyncio, json, tracemalloc
import gymsdk
from gymsdk.concurrency import run_event_loop
from gymsdk.rollouts.jobs import build_input_row, iter_jobs
from gymsdk.rollouts.players import LocalPlayer, collect

IN_FLIGHT = 2000
TOOLS = [{"type": "function", "name": f"tool_{n}", "description": "x" * 8000} for n in range(5)]
reached = asyncio.Event()

class Silent(asyncio.Protocol):
    requests = 0
    def data_received(self, data):
        if data.startswith(b"POST"):
            Silent.requests += 1
            if Silent.requests == IN_FLIGHT:
                reached.set()

def build_rows():
    environment = gymsdk.load("sums")
    [task] = [task for task, _ in zip(environment.tasks("train"), range(1))]
    for number in range(IN_FLIGHT):
        row = json.loads(json.dumps(task.row()))
        row["responses_create_params"]["tools"] = json.loads(json.dumps(TOOLS))
        yield build_input_row(row, environment="sums", task=number)

async def main():
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Silent, "127.0.0.1", 0, backlog=IN_FLIGHT)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    model = gymsdk.model("endpoint/silent", base_url=url)
    async with gymsdk.load("sums") as environment:
        tracemalloc.start()
        before, _ = tracemalloc.get_traced_memory()
        play = LocalPlayer({"sums": environment}, model)

        async def run():
            async for _ in collect(iter_jobs(build_rows()), play, concurrency=IN_FLIGHT):
                pass

        playing = asyncio.ensure_future(run())
        await reached.wait()
        after, _ = tracemalloc.get_traced_memory()
        print(json.dumps({"bytes": (after - before) / IN_FLIGHT, "body": len(json.dumps(TOOLS))}), flush=True)
        playing.cancel()
        await asyncio.wait({playing})

run_event_loop(main())
"""

MAX_BYTES = 32 * 1024
"""The memory of a rollout in flight with a small row; its tools alone would be larger."""


@pytest.mark.slow
def test_two_thousand_rollouts_in_flight_share_their_tools_and_keep_no_request_bodies(
    installed: Callable[..., Path],
) -> None:
    installed()
    command = [sys.executable, "-c", PROGRAM]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert result.returncode == 0, result.stderr
    measured = json.loads(result.stdout)
    assert measured["body"] > MAX_BYTES
    assert measured["bytes"] < MAX_BYTES, result.stdout
