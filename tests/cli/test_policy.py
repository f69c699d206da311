"""`gymsdk policy serve`: start, requests and stop."""

from __future__ import annotations

import json
import re
import signal
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest

from .conftest import Command, Start, StartServer

SUM = {"messages": [{"role": "user", "content": "What is 40 + 2?"}]}


def request_reply(url: str, body: dict[str, Any] | None = None) -> Any:
    return httpx.post(f"{url}/chat/completions", json=body or SUM).json()["choices"][0]["message"]["content"]


def test_json_prints_one_line_and_a_signal_stops_the_endpoint(start_server: StartServer) -> None:
    process, output = start_server("policy", "serve", "echo", "--name", "parrot")
    assert (output["pid"], output["model"]) == (process.pid, "parrot")
    assert request_reply(output["url"]) == "What is 40 + 2?"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (0, "", "\nstopping; press Ctrl-C again to stop at once\n")


@pytest.mark.slow
def test_text_output_suggests_commands_and_a_script_file_answers(start: Start, workdir: Path) -> None:
    script = workdir / "lines.jsonl"
    script.write_text('{"text": "I pass."}\n{"text": "42", "when": "40 + 2"}\n')
    process = start("policy", "serve", f"scripted/script:{script}", "--port", 0)
    lines = [process.stdout.readline() for _ in range(4)]
    url = lines[0].split()[1]
    assert lines[1] == f"Try: GYMSDK_BASE_URL={url} gymsdk rollout math --model vllm/policy\n"
    assert lines[3] == "Ready. Press Ctrl-C to stop.\n"
    assert request_reply(url) == "42"


@pytest.mark.slow
def test_the_oracle_plays_the_tasks_of_several_environments_and_says_which_it_knows(
    start_server: StartServer, gymsdk: Command, workdir: Path
) -> None:
    environments = ("--env", "sums", "--env", "multineedle", "--set", "sums.digits=1", "--limit", 40)
    _, output = start_server("policy", "serve", "oracle", *environments)
    rollout = ("rollout", "sums", "--model", "vllm/policy", "--base-url", output["url"], "--output", workdir / "out")
    result = gymsdk(*rollout, "--limit", 3, "--set", "digits=1", "--json")
    assert result.code == 0, result.err
    rewards = [json.loads(line)["reward"] for line in (workdir / "out" / "rollouts.jsonl").read_text().splitlines()]
    assert rewards == [1.0] * 3
    error = httpx.post(f"{output['url']}/chat/completions", json=SUM).json()["error"]
    assert re.search(r"\(read: [1-9]\d* of sums, [1-9]\d* of multineedle\)", error["message"])


@pytest.mark.slow
def test_the_oracle_of_another_environment_stops_a_run_and_says_what_to_change(
    start_server: StartServer, gymsdk: Command, workdir: Path
) -> None:
    _, output = start_server("policy", "serve", "oracle", "--env", "multineedle")
    result = gymsdk(
        *("rollout", "sums", "--model", "endpoint/policy", "--base-url", output["url"]),
        *("--limit", 200, "--output", workdir / "out"),
    )
    assert result.code == 1
    assert re.search(
        r"stopped: the last 64 rollouts failed .*this conversation offers no tools, and every row does"
        r" \(read: 5\d\d of multineedle\); start the oracle with the --env",
        result.err,
    )


@pytest.mark.slow
def test_faults_can_be_set_on_the_command_line(start_server: StartServer) -> None:
    _, output = start_server("policy", "serve", "echo", "--context", 30, "--limited", 0.5, "--latency", "exp:0.001")
    responses = [httpx.post(f"{output['url']}/chat/completions", json=SUM) for _ in range(20)]
    assert {answer.status_code for answer in responses} == {400, 429}


def test_a_port_in_use_is_named(gymsdk: Command) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = gymsdk("policy", "serve", "echo", "--port", port)
    assert result.code == 2
    assert f"port {port} of 127.0.0.1" in result.err
