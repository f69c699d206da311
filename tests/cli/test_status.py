"""`gymsdk status`, with text for people and JSON for programs."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from typing import TypeAlias

import pytest

from gymsdk.cli.status import format_status
from gymsdk.cluster.status import ServerStatus, StatusReport

Start: TypeAlias = "Callable[..., subprocess.Popen[str]]"


def run_status(start: Start, *arguments: object) -> tuple[int, str, str]:
    """Run `gymsdk status` and return its exit code and output."""
    process = start("status", *arguments)
    out, err = process.communicate(timeout=30)
    return process.returncode, out, err


def serve_sums(start: Start) -> tuple[subprocess.Popen[str], str]:
    process = start("serve", "sums", "--port", 0, "--json")
    return process, json.loads(process.stdout.readline())["head"]


@pytest.mark.slow
def test_status_is_healthy_if_every_server_answers(start: Start):
    _, head = serve_sums(start)
    code, out, _ = run_status(start, "--head", head)
    assert (code, f"{head}: 4 of 4 expected servers registered" in out) == (0, True)
    code, line, _ = run_status(start, "--head", head, "--json")
    servers = {each["name"]: each for each in json.loads(line)["servers"]}
    assert (code, json.loads(line)["ok"], json.loads(line)["round_trip_by"]) == (0, True, "head")
    assert {name: each["health"] for name, each in servers.items()} == dict.fromkeys(
        ["head", "sums", "sums_simple_agent", "sums_environment_server", "policy_model"], "success"
    )
    assert servers["sums"]["sessions"] == servers["sums"]["in_flight"] == 0
    assert all(each["uptime"] >= 0 for each in servers.values())


@pytest.mark.slow
def test_without_a_head_status_says_how_to_start_one(start: Start):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    code, out, err = run_status(start, "--head", f"http://127.0.0.1:{port}")
    assert (code, out) == (1, "")
    assert f"no head answers at http://127.0.0.1:{port}" in err
    assert "start one with `gymsdk serve NAME`" in err


@pytest.mark.slow
def test_a_killed_head_is_reported_as_missing(start: Start):
    process, head = serve_sums(start)
    process.kill()
    process.wait()
    code, out, _ = run_status(start, "--head", head)
    assert (code, out) == (1, "")


def test_a_slow_round_trip_and_an_idle_gpu_are_marked():
    rows = [ServerStatus(name="math", kind="resources_servers", health="success", round_trip=0.25, wrong=["slow"])]
    rows += [ServerStatus(name="policy_model", health="success", gpus={"0": 0.97, "1": 0.12})]
    report = StatusReport(head="http://h:1", nodes=0, expected=2, registered=2, round_trip_by="head", servers=rows)
    assert "250.0 ms !" in format_status(report)
    assert "97% 12% !" in format_status(report)
    assert not report.is_healthy
    assert report.model_copy(update={"servers": rows[1:]}).is_healthy


def test_a_single_node_is_printed_in_singular():
    report = StatusReport(
        head="http://h:1", nodes=1, expected=0, registered=0, round_trip_by="head", servers=[ServerStatus(name="a")]
    )
    assert format_status(report).endswith("registered, plus 1 node")
    assert format_status(report.model_copy(update={"nodes": 2})).endswith("registered, plus 2 nodes")


def test_an_exit_is_described_in_words():
    row = ServerStatus(name="math", exit_code=-9, exit_at=time.time() - 5, restarts=3, wrong=["exit"])
    report = StatusReport(head="http://h:1", nodes=1, expected=1, registered=0, round_trip_by="head", servers=[row])
    assert "killed by SIGKILL, 5 s ago, 3 restarts !" in format_status(report)


def test_an_exit_of_a_process_is_reported_once_for_all_its_servers():
    ended = {"process": "worker-1", "health": "success", "exit_code": -9, "exit_at": time.time() - 5, "restarts": 1}
    names = ("math", "math_simple_agent", "policy_model")
    rows = [
        ServerStatus(name=name, uptime=4.0 + number / 100, wrong=["exit"], **ended) for number, name in enumerate(names)
    ]
    rows += [ServerStatus(name=name, process="worker-2", health="success") for name in names]
    report = StatusReport(head="http://h:1", nodes=2, expected=3, registered=3, round_trip_by="head", servers=rows)
    assert [line for line in format_status(report).splitlines() if line.startswith("!")] == [
        "! worker-1 ended unexpectedly (killed by SIGKILL, 5 s ago); it was started again"
    ]


def test_a_server_that_ended_and_was_not_started_again_is_reported_as_such():
    row = ServerStatus(name="math", exit_code=1, exit_at=time.time() - 5, restarts=1, wrong=["missing", "exit"])
    report = StatusReport(head="http://h:1", nodes=1, expected=1, registered=0, round_trip_by="head", servers=[row])
    assert [line for line in format_status(report).splitlines() if line.startswith("!")] == [
        "! math ended unexpectedly (exit code 1, 5 s ago)",
        "! math is expected but not registered",
    ]


@pytest.mark.slow
def test_watch_refreshes_until_a_signal(start: Start):
    _, head = serve_sums(start)
    process = start("status", "--head", head, "--json", "--watch")
    lines = [process.stdout.readline() for _ in range(2)]
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 0
    assert [json.loads(line)["ok"] for line in lines] == [True, True]
