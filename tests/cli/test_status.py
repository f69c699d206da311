"""`gymsdk status`, with text for people and JSON for programs."""

from __future__ import annotations

import json
import signal
import socket
import time

import pytest

from cli.conftest import Start, StartServer
from gymsdk.cli.status import format_status
from gymsdk.cluster.status import ServerStatus, StatusReport


def run_status(start: Start, *arguments: object) -> tuple[int, str, str]:
    """Run `gymsdk status` and return its exit code and output."""
    process = start("status", *arguments)
    out, err = process.communicate(timeout=30)
    return process.returncode, out, err


@pytest.mark.slow
def test_status_is_healthy_if_every_server_answers(start: Start, start_server: StartServer):
    head = start_server("serve", "sums")[1]["head"]
    code, out, _ = run_status(start, "--head", head)
    assert (code, f"{head}: 4 of 4 expected servers registered" in out) == (0, True)
    code, line, _ = run_status(start, "--head", head, "--json")
    servers = {server["name"]: server for server in json.loads(line)["servers"]}
    assert (code, json.loads(line)["ok"], json.loads(line)["round_trip_by"]) == (0, True, "head")
    assert {name: server["health"] for name, server in servers.items()} == dict.fromkeys(
        ["head", "sums", "sums_simple_agent", "sums_environment_server", "policy_model"], "success"
    )
    assert servers["sums"]["sessions"] == servers["sums"]["in_flight"] == 0
    assert all(server["uptime"] >= 0 for server in servers.values())


@pytest.mark.slow
def test_without_a_head_status_says_how_to_start_one(start: Start):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    code, out, err = run_status(start, "--head", f"http://127.0.0.1:{port}")
    assert (code, out) == (1, "")
    assert f"no head answers at http://127.0.0.1:{port}" in err
    assert "start one with `gymsdk serve NAME`" in err


@pytest.mark.slow
def test_a_killed_head_is_reported_as_missing(start: Start, start_server: StartServer):
    process, ready = start_server("serve", "sums")
    process.kill()
    process.wait()
    code, out, _ = run_status(start, "--head", ready["head"])
    assert (code, out) == (1, "")


def build_report(*rows: ServerStatus, nodes: int = 1, expected: int = 1) -> StatusReport:
    return StatusReport(
        head="http://h:1", nodes=nodes, expected=expected, registered=0, round_trip_by="head", servers=list(rows)
    )


def list_exits(report: StatusReport) -> list[str]:
    return [line for line in format_status(report).splitlines() if line.startswith("!")]


def test_a_slow_round_trip_and_an_idle_gpu_are_marked():
    slow = ServerStatus(name="math", kind="resources_servers", health="success", round_trip=0.25, wrong=["slow"])
    idle = ServerStatus(name="policy_model", health="success", gpus={"0": 0.97, "1": 0.12})
    report = build_report(slow, idle, nodes=0)
    assert "250.0 ms !" in format_status(report)
    assert "97% 12% !" in format_status(report)
    assert not report.is_healthy
    assert build_report(idle, nodes=0, expected=0).is_healthy
    plain = ServerStatus(name="a")
    assert format_status(build_report(plain)).endswith("registered, plus 1 node")
    assert format_status(build_report(plain, nodes=2)).endswith("registered, plus 2 nodes")


def test_the_end_of_a_process_is_described_in_words_once_for_all_its_servers():
    ended = {"process": "worker-1", "health": "success", "exit_code": -9, "exit_at": time.time() - 5, "restarts": 1}
    names = ("math", "math_simple_agent", "policy_model")
    rows = [
        ServerStatus(name=name, uptime=4.0 + number / 100, wrong=["exit"], **ended) for number, name in enumerate(names)
    ]
    rows += [ServerStatus(name=name, process="worker-2", health="success") for name in names]
    often = rows[0].model_copy(update={"restarts": 3})
    assert "killed by SIGKILL, 5 s ago, 3 restarts !" in format_status(build_report(often))
    assert list_exits(build_report(*rows)) == [
        "! worker-1 ended unexpectedly (killed by SIGKILL, 5 s ago); it was started again"
    ]
    row = ServerStatus(name="math", exit_code=1, exit_at=time.time() - 5, restarts=1, wrong=["missing", "exit"])
    assert list_exits(build_report(row)) == [
        "! math ended unexpectedly (exit code 1, 5 s ago)",
        "! math is expected but not registered",
    ]


@pytest.mark.slow
def test_watch_refreshes_until_a_signal(start: Start, start_server: StartServer):
    head = start_server("serve", "sums")[1]["head"]
    process = start("status", "--head", head, "--json", "--watch")
    lines = [process.stdout.readline() for _ in range(2)]
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 0
    assert [json.loads(line)["ok"] for line in lines] == [True, True]
