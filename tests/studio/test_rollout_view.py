"""`gymsdk rollout --view` shows the run while it plays, and leaves no process behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

COMMAND = [sys.executable, "-m", "gymsdk", "rollout", "math", "--split", "train", "--view"]


def start(tmp_path: Path, *options: str) -> tuple[subprocess.Popen[str], str, str]:
    """Start a run, and return its process and the address and the token of its viewer."""
    command = [*COMMAND, *options, "--output", str(tmp_path / "run")]
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stderr is not None
    line = next(line for line in process.stderr if line.startswith("http://"))
    base, _, token = line.strip().partition("/#token=")
    return process, base, token


def is_listening(base: str) -> bool:
    try:
        httpx.get(base)
    except httpx.TransportError:
        return False
    return True


def wait_until_closed(base: str) -> None:
    until = time.monotonic() + 30
    while is_listening(base):
        assert time.monotonic() < until, "the viewer is still there"
        time.sleep(0.1)


def test_the_viewer_shows_the_run_and_ends_with_it(tmp_path: Path) -> None:
    process, base, token = start(tmp_path, "--limit", "3000", "--concurrency", "8")
    headers = {"Authorization": f"Bearer {token}"}
    counts = []
    while process.poll() is None and len(counts) < 3:
        answer = httpx.get(f"{base}/api/runs/run/rows", headers=headers)
        counts.append(answer.json()["total"])
        time.sleep(0.2)
    assert sorted(counts) == counts
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "token" not in out
    wait_until_closed(base)


def test_a_finished_run_keeps_its_output_and_its_exit_code(tmp_path: Path) -> None:
    # Without a terminal, the viewer ends with the run, so a short run may end before the viewer has started.
    process, base, _ = start(tmp_path, "--limit", "10000", "--json")
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert out.startswith(("[", "{"))
    assert not re.search("http://", out.partition("environment")[0])
    wait_until_closed(base)


def test_a_killed_run_leaves_no_viewer(tmp_path: Path) -> None:
    process, base, _ = start(tmp_path, "--limit", "100000")
    process.kill()
    process.communicate(timeout=30)
    wait_until_closed(base)


def test_a_port_in_use_and_a_missing_run_are_explained(tmp_path: Path) -> None:
    def view(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "gymsdk", "view", *map(str, arguments), "--no-browser"]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60, check=False)

    for done, message in (
        (view(), "there is no folder rollouts"),
        (view(tmp_path), "holds no run"),
        (view(tmp_path / "missing"), "does not exist"),
    ):
        assert (done.returncode, done.stdout) == (2, "")
        assert message in done.stderr
    (tmp_path / "rollouts").mkdir()
    with pytest.raises(subprocess.TimeoutExpired):
        subprocess.run(
            [sys.executable, "-m", "gymsdk", "view", "--no-browser"],
            cwd=tmp_path,
            capture_output=True,
            timeout=5,
            check=True,
        )
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = view("--port", taken.getsockname()[1])
    assert done.returncode == 2
    assert "choose another --port" in done.stderr
