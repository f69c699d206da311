"""Commands with many connections, in processes with a low limit of open files."""

from __future__ import annotations

import json
import resource
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

from cli.conftest import StartServer


def _run_limited(arguments: list[object], *, soft: int, hard: int) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process with a limit of *soft* open files that it may raise to *hard*."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    command = [sys.executable, "-m", "gymsdk", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, preexec_fn=limit)


def _rollout_arguments(url: str, folder: str, concurrency: int) -> list[object]:
    arguments = ["rollout", "sums", "--model", "vllm/policy", "--base-url", url, "--limit", 100, "-k", 4]
    return [*arguments, "--concurrency", concurrency, "-o", folder]


def _lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]


def test_a_run_raises_the_soft_limit_of_open_files(start_server: StartServer, workdir: Path) -> None:
    url = start_server("policy", "serve", "null", "--latency", 2)[1]["url"]
    result = _run_limited(_rollout_arguments(url, "out", 400), soft=200, hard=4000)
    assert result.returncode == 0, result.stderr
    assert len(_lines(workdir / "out")) == 400
    assert "open files" not in result.stderr


def test_concurrency_is_limited_by_the_hard_limit_of_files(start_server: StartServer, workdir: Path) -> None:
    url = start_server("policy", "serve", "null", "--latency", 0.5)[1]["url"]
    result = _run_limited(_rollout_arguments(url, "out", 400), soft=200, hard=400)
    assert result.returncode == 0, result.stderr
    assert len(_lines(workdir / "out")) == 400
    assert "--concurrency 400 needs more connections than this process may open (400 files); " in result.stderr
    assert "Raise the limit with `ulimit -Hn`" in result.stderr


def test_a_server_out_of_descriptors_logs_a_line_a_second_and_recovers(start_server: StartServer) -> None:
    process, ready = start_server("policy", "serve", "null")
    assert process.stderr is not None
    url = ready["url"]
    address = "127.0.0.1", httpx.URL(url).port or 0
    open_files = sum(1 for _ in Path(f"/proc/{process.pid}/fd").iterdir())
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (open_files + 10, open_files + 10))
    started = time.monotonic()
    with ExitStack() as clients:
        for _ in range(50):
            clients.enter_context(socket.create_connection(address, timeout=60))
        first = process.stderr.readline()
        second = process.stderr.readline()
    assert httpx.get(url.removesuffix("/v1"), timeout=60).status_code == 200
    process.terminate()
    rest = process.communicate(timeout=60)[1]
    seconds = time.monotonic() - started
    messages = [line for line in (first, second, *rest.splitlines()) if line.startswith("no further connection can be")]
    assert 2 <= len(messages) <= seconds + 1
    assert "Traceback" not in first + second + rest
