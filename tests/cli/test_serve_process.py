"""`gymsdk serve` as a process: request logs, precedence of options over files, and wrong heads."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import httpx
import pytest

from cli.conftest import Start, StartServer

FILE = "head_server: {port: 1}\nsums:\n  resources_servers:\n    sums:\n"


@pytest.mark.slow
def test_a_new_process_logs_each_request(start_server: StartServer, workdir: Path) -> None:
    process, output = start_server("serve", "sums", "--log-level", "info", "--log-dir", "logs")
    row = {"responses_create_params": {"input": [{"role": "user", "content": "What is 1 + 2?"}]}, "answer": 3}
    sent = row | {"_ng_rollout_id": "look-here"}
    assert httpx.post(f"{output['servers']['sums_simple_agent']['url']}/run", json=sent).status_code == 200
    process.send_signal(signal.SIGTERM)
    process.wait(20)
    [line] = (workdir / "logs" / "sums_simple_agent.log").read_text().splitlines()
    assert "rollout=look-here" in line
    assert "POST /run 200" in line


@pytest.mark.slow
def test_the_port_option_overrides_the_file(start_server: StartServer, workdir: Path) -> None:
    (workdir / "a.yaml").write_text(FILE)
    assert httpx.URL(start_server("serve", "--config", "a.yaml", "--port", 0)[1]["head"]).port != 1


@pytest.mark.slow
def test_a_node_that_waits_for_its_head_can_be_stopped(start: Start) -> None:
    process = start("serve", "sums", "--head", "http://127.0.0.1:9", "--log-level", "debug")
    while "/readyz" not in process.stderr.readline():
        pass
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=20)
    assert "left behind" not in errors


@pytest.mark.slow
def test_a_head_that_does_not_answer_is_named_without_an_option_that_does_not_exist(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        host = f"127.0.0.1:{silent.getsockname()[1]}"
        process = start("serve", "sums", "--separate", "--head", f"http://{host}")
        line = next(line for line in process.stderr if line.startswith("no head answers"))
    reason = f"{host} did not answer within 2 s; check the server's log and its load"
    assert line == f"no head answers at http://{host} yet ({reason}); waiting for it for at most 60 s\n"


@pytest.mark.slow
def test_file_names_that_are_not_utf_8_reach_separate_servers(start_server: StartServer, workdir: Path) -> None:
    ending = os.fsdecode(b"-caf\xe9")
    config, token, logs = workdir / f"config{ending}.yaml", workdir / f"token{ending}", workdir / f"logs{ending}"
    try:
        config.write_text("sums:\n  resources_servers:\n    sums:\n")
    except OSError:
        pytest.skip("this file system has no such names")
    token.write_text("0123456789abcdef" * 2)
    token.chmod(0o600)
    files = ("--config", config, "--token-file", token, "--log-dir", logs)
    process, ready = start_server("serve", *files, "--separate", "--log-level", "info")
    url = f"{ready['servers']['sums']['url']}/openapi.json"
    headers = {"Authorization": f"Bearer {token.read_text()}"}
    assert [httpx.get(url, headers=given).status_code for given in ({}, headers)] == [401, 200]
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert " 200 in " in (logs / "sums.log").read_text()
