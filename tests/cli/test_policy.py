"""`gymsdk policy serve`: start, requests and stop."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import httpx
import pytest

from .conftest import Command

Start: TypeAlias = "Callable[..., subprocess.Popen[str]]"
SUM = {"messages": [{"role": "user", "content": "What is 40 + 2?"}]}


def told(start: Start, *words: object) -> tuple[subprocess.Popen[str], dict[str, Any]]:
    process = start("policy", "serve", *words, "--port", 0, "--json")
    line = process.stdout.readline()
    assert line, process.stderr.read()
    return process, json.loads(line)


def reply(url: str, body: dict[str, Any] | None = None) -> Any:
    return httpx.post(f"{url}/chat/completions", json=body or SUM).json()["choices"][0]["message"]["content"]


def test_json_prints_one_line_and_a_signal_stops_the_endpoint(start: Start) -> None:
    process, said = told(start, "echo", "--name", "parrot")
    assert (said["pid"], said["model"]) == (process.pid, "parrot")
    assert reply(said["url"]) == "What is 40 + 2?"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (0, "", "\nstopping; press Ctrl-C again to stop at once\n")


def test_text_output_suggests_commands(start: Start) -> None:
    process = start("policy", "serve", "null", "--port", 0)
    lines = [process.stdout.readline() for _ in range(4)]
    url = lines[0].split()[1]
    assert lines[1] == f"Try: GYMSDK_BASE_URL={url} gymsdk rollout math --model vllm/policy\n"
    assert lines[3] == "Ready. Press Ctrl-C to stop.\n"
    assert reply(url) == ""


def test_a_rollout_plays_a_script_file(start: Start, gymsdk: Command, there: Path) -> None:
    script = there / "lines.jsonl"
    script.write_text('{"text": "I pass."}\n{"text": "42", "when": "40 + 2"}\n')
    _, said = told(start, f"scripted/script:{script}")
    assert reply(said["url"]) == "42"
    ended = gymsdk(
        *("rollout", "sums", "--model", "vllm/policy", "--base-url", said["url"]),
        *("--limit", 2, "--output", there / "out", "--json"),
    )
    assert ended.code == 0, ended.err


def test_the_oracle_knows_the_tasks_of_an_environment(start: Start, gymsdk: Command, there: Path) -> None:
    _, said = told(start, "oracle", "--env", "sums")
    ended = gymsdk(
        *("rollout", "sums", "--model", "vllm/policy", "--base-url", said["url"]),
        *("--limit", 3, "--output", there / "out", "--json"),
    )
    assert ended.code == 0, ended.err
    rewards = [json.loads(line)["reward"] for line in (there / "out" / "rollouts.jsonl").read_text().splitlines()]
    assert rewards == [1.0] * 3


def test_the_oracle_knows_the_tasks_of_several_environments(start: Start) -> None:
    _, said = told(start, "oracle", "--env", "sums", "--env", "multineedle", "--set", "sums.digits=1", "--limit", 40)
    error = httpx.post(f"{said['url']}/chat/completions", json=SUM).json()["error"]
    assert re.search(r"\(read: [1-9]\d* of sums, [1-9]\d* of multineedle\)", error["message"])


def test_faults_are_named_on_the_command_line(start: Start) -> None:
    _, said = told(start, "echo", "--context", 30, "--limited", 0.5, "--latency", "exp:0.001")
    answers = [httpx.post(f"{said['url']}/chat/completions", json=SUM) for _ in range(20)]
    assert {answer.status_code for answer in answers} == {400, 429}


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["oracel"], "no scripted policy named 'oracel'"),
        (["oracle"], "name them with --env"),
        (["oracle", "--env", "sumz"], "no environment named 'sumz'"),
        (["oracle", "--env", "sums", "--split", "nowhere"], "no split 'nowhere'"),
        (["echo", "--env", "sums"], "--env applies to the oracle only"),
        (["script:nowhere.jsonl"], "nowhere.jsonl"),
        (["echo", "--host", "0.0.0.0"], "or allow it with --insecure"),
        (["echo", "--host", "no such"], "'no such' is not an address of this machine"),
        (["echo", "--latency", "soon"], "--latency: 'soon' is no latency; write seconds as"),
        (["echo", "--latency", "0.5-0.1"], "the smaller number comes first, as in 0.1-0.5"),
        (["echo", "--name", ""], "--name is empty"),
        (["echo", "--errors", "0.6", "--cuts", "0.6"], "add up to more than 1"),
        (["echo", "--reasoning", "loud"], "loud"),
    ],
)
def test_invalid_policies_are_rejected_in_one_sentence(gymsdk: Command, words: list[str], complaint: str) -> None:
    ended = gymsdk("policy", "serve", *words, "--port", 0)
    assert (ended.code, ended.out) == (2, "")
    assert complaint in ended.err


def test_a_port_in_use_is_named(gymsdk: Command) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = gymsdk("policy", "serve", "echo", "--port", port)
    assert ended.code == 2
    assert f"port {port} of 127.0.0.1" in ended.err
