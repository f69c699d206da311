"""Start the generation server and gymsdk's servers as processes, and stop them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx
from engines import OwnEngine, VllmEngine
from exercises import Exercise
from models import format_settings

START_SECONDS = 300.0


class Servers(NamedTuple):
    """The URLs of the generation server and of gymsdk's head."""

    generation_url: str
    head: str


@contextmanager
def deploy(exercise: Exercise, engine: OwnEngine | VllmEngine, log: Path) -> Iterator[Servers]:
    """Run *engine*, which writes its output to *log*, and the servers of *exercise* while the context is open."""
    with ExitStack() as stack:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        variables = os.environ | engine.environment
        output = stack.enter_context(log.open("wb"))
        command = engine.build_command(port)
        generation_server = stack.enter_context(
            subprocess.Popen(command, env=variables, stdout=output, stderr=subprocess.STDOUT)
        )
        stack.callback(generation_server.terminate)
        url = f"http://127.0.0.1:{port}"
        wait_until_ready(url, generation_server, log)
        model = ["--model", "vllm/policy", "--base-url", f"{url}/v1", "--token-ids", *engine.model_options]
        settings = format_settings(exercise.settings)
        command = [sys.executable, "-P", "-m", "gymsdk", "serve", exercise.environment, *settings, *model]
        command += ["--port", "0", "--json"]
        servers = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        stack.callback(servers.terminate)
        assert servers.stdout is not None
        line = servers.stdout.readline()
        if not line:
            raise SystemExit(f"{' '.join(command)} ended with status {servers.wait()}")
        yield Servers(url, json.loads(line)["head"])


def wait_until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until and process.poll() is None:
        try:
            httpx.get(f"{url}/v1/models")
        except httpx.TransportError:
            time.sleep(0.1)
        else:
            return
    raise SystemExit(f"the generation server did not start:\n{log.read_text()[-3000:]}")
