"""The table of `benchmarks/README.md` and the script that fills it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import httpx
import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "benchmarks" / "performance.py"


def run_script(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)


def test_the_page_lists_the_rows_that_the_script_measures() -> None:
    rejected = run_script("--row", "none").stderr
    rows = re.findall(r"'?([\w-]+)'?", rejected.rpartition("choose from ")[2])
    page = (ROOT / "benchmarks" / "README.md").read_text()
    documented = re.findall(r"^\|.*performance.py --row ([\w-]+)", page, re.MULTILINE)
    assert documented == rows


def test_a_peer_that_fails_is_reported_with_its_error_and_the_next_peers_are_tried(tmp_path: Path) -> None:
    venv.create(tmp_path)
    peers = {"inspect_ai": str(tmp_path / "bin" / "python"), "verifiers": "/no/such/python", "nemo_gym": "/bin/echo"}
    options = [option for name, python in peers.items() for option in ("--peer", f"{name}={python}")]
    completed = run_script("--row", "peers", "--scale", "0.1", "--repeats", "1", *options)
    assert completed.returncode == 1, completed.stderr
    failures = [line for line in completed.stdout.splitlines() if "failed: " in line]
    assert len(failures) == len(peers), completed.stdout
    assert "inspect_ai: exit status 1: ModuleNotFoundError: No module named 'inspect_ai'" in failures[0]
    assert "verifiers: [Errno 2] No such file or directory: '/no/such/python'" in failures[1]
    assert "nemo_gym: the last line is not a result: " in failures[2]


def test_the_stub_streams_a_chat_completion_when_the_request_asks_for_it() -> None:
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": {}}}
    messages: list[dict[str, Any]] = [{"role": "user", "content": "what's it like in sf?"}]
    command = [sys.executable, str(ROOT / "benchmarks" / "yardstick" / "stub.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as stub:
        try:
            assert stub.stdout is not None
            url = json.loads(stub.stdout.readline())["url"]

            def read_delta() -> dict[str, Any]:
                body = {"model": "stub", "messages": messages, "tools": [tool], "stream": True}
                response = httpx.post(f"{url}/v1/chat/completions", json=body)
                assert response.headers["content-type"] == "text/event-stream"
                first, usage, done = (line.removeprefix("data: ") for line in response.text.split("\n\n") if line)
                assert done == "[DONE]"
                assert json.loads(usage)["usage"]["total_tokens"] > 0
                delta: dict[str, Any] = json.loads(first)["choices"][0]["delta"]
                return delta

            delta = read_delta()
            assert [(call["index"], call["function"]["name"]) for call in delta["tool_calls"]] == [(0, "get_weather")]
            messages.append({"role": "tool", "tool_call_id": delta["tool_calls"][0]["id"], "content": "cold"})
            assert "cold" in read_delta()["content"]
        finally:
            stub.terminate()


@pytest.mark.slow
def test_one_row_is_measured_next_to_the_floor(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    completed = run_script("--row", "turns", "--scale", "0.1", "--repeats", "1", "--json", str(figures))
    assert completed.returncode in {0, 1}, completed.stderr
    measured = json.loads(figures.read_text())
    assert {figure["row"] for figure in measured} == {"turns"}
    assert measured[0]["value"] > measured[0]["floor"] > 0
    assert completed.returncode == int(not all(figure["is_within_limit"] for figure in measured))
    assert [figure["value"] for figure in measured if figure["name"] == "failed episodes"] == [0]
