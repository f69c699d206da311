"""Commands with many connections, in processes that may have few files open."""

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

from cli.conftest import Start


def _policy(start: Start, *words: object) -> str:
    process = start("policy", "serve", "null", *words, "--port", 0, "--json")
    assert process.stdout is not None
    url: str = json.loads(process.stdout.readline())["url"]
    return url


def _limited(words: list[object], *, soft: int, hard: int) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process that may have *soft* files open, and raise that to *hard*."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    command = [sys.executable, "-m", "gymsdk", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, preexec_fn=limit)


def _rollout(url: str, folder: str, concurrency: int) -> list[object]:
    words = ["rollout", "sums", "--model", "vllm/policy", "--base-url", url, "--limit", 100, "-k", 4]
    return [*words, "--concurrency", concurrency, "-o", folder]


def _lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]


def test_a_run_raises_the_soft_limit_of_open_files(start: Start, there: Path) -> None:
    url = _policy(start, "--latency", 2)
    ended = _limited(_rollout(url, "out", 400), soft=200, hard=4000)
    assert ended.returncode == 0, ended.stderr
    assert len(_lines(there / "out")) == 400
    assert "open files" not in ended.stderr


def test_concurrency_is_limited_by_the_hard_limit_of_files(start: Start, there: Path) -> None:
    url = _policy(start, "--latency", 0.5)
    ended = _limited(_rollout(url, "out", 400), soft=200, hard=400)
    assert ended.returncode == 0, ended.stderr
    assert len(_lines(there / "out")) == 400
    assert "--concurrency 400 needs more connections than this process may open (400 files); " in ended.stderr
    assert "Raise the limit with `ulimit -Hn`" in ended.stderr


def test_a_server_out_of_descriptors_logs_a_line_a_second_and_recovers(start: Start) -> None:
    process = start("policy", "serve", "null", "--port", 0, "--json")
    assert process.stdout is not None
    assert process.stderr is not None
    url = json.loads(process.stdout.readline())["url"]
    address = "127.0.0.1", httpx.URL(url).port or 0
    opened = sum(1 for _ in Path(f"/proc/{process.pid}/fd").iterdir())
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (opened + 10, opened + 10))
    began = time.monotonic()
    with ExitStack() as clients:
        for _ in range(50):
            clients.enter_context(socket.create_connection(address, timeout=60))
        first = process.stderr.readline()
        second = process.stderr.readline()
    assert httpx.get(url.removesuffix("/v1"), timeout=60).status_code == 200
    process.terminate()
    rest = process.communicate(timeout=60)[1]
    seconds = time.monotonic() - began
    told = [line for line in (first, second, *rest.splitlines()) if line.startswith("no further connection can be")]
    assert 2 <= len(told) <= seconds + 1
    assert "Traceback" not in first + second + rest
