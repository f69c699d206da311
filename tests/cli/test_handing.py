"""What a supervisor hands down to its servers: settings where nobody else can read them, and no socket any further."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.conftest import Start
from gymsdk.cli import handing


def test_settings_are_no_words_of_the_command_by_which_a_server_is_started() -> None:
    words = ["serve", "sums", "--insecure", "key=hush", "--set", "a=1", "--set=b=2", "a=1", "--separate", "--port", "0"]
    assert handing.again(words, ("key=hush", "a=1")) == ["serve", "sums", "--insecure"]


def test_a_port_of_a_server_that_reads_like_a_setting_stays() -> None:
    words = ["serve", "a=1", "--server-port", "a=1", "--", "--flag"]
    assert handing.again(words, ("a=1",)) == ["serve", "--server-port", "a=1"]


def test_settings_that_were_handed_down_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(handing.VARIABLE, raising=False)
    assert handing.taken() == handing.Handed()
    handed = handing.Handed(overrides=("policy_api_key=hush",), settings=("key=hush",), model="scripted/null")
    for name, value in handed.variables().items():
        monkeypatch.setenv(name, value)
    assert handing.taken() == handed
    assert handing.VARIABLE not in os.environ


def test_a_socket_that_was_handed_down_goes_no_further() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        file = os.dup(listening.fileno())
        os.set_inheritable(file, True)
        with handing.socket_at(file):
            assert not os.get_inheritable(file)


def children(process: subprocess.Popen[str]) -> list[str]:
    """The words of the processes that *process* has started."""
    found = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ") for pid in found]


def test_no_server_has_a_setting_in_its_words(start: Start, there: Path) -> None:
    address = "http://127.0.0.1:9/v1?key=hush-address"
    process = start(
        "serve",
        "sums",
        "--separate",
        "--port",
        0,
        "--json",
        "--set",
        "key=hush-set",
        "--model",
        "vllm/x",
        "--base-url",
        address,
        "--pin",
        "user=hush-pin",
        "policy_api_key=hush-override",
    )
    line = process.stdout.readline()
    assert line, process.stderr.read()
    told = children(process)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert len(told) == 1 + len(json.loads(line)["servers"])
    assert all("--only" in each and "hush" not in each for each in told)
    assert "--set key is on the command line, which everybody on this machine can read" in said
    assert said.count("policy_api_key is on the command line") == 1
    assert "hush-" not in line + said


def test_what_was_handed_down_is_what_is_served(start: Start, installed: Callable[..., Path]) -> None:
    import httpx

    process = start(
        "serve", "sums", "--separate", "--port", 0, "--json", "--set", "digits=1", "--model", "scripted/null"
    )
    line = process.stdout.readline()
    assert line, process.stderr.read()
    agent = json.loads(line)["servers"]["sums_simple_agent"]["url"]
    asked = {"responses_create_params": {"input": [{"role": "user", "content": "1 + 1?"}]}, "answer": 2}
    assert httpx.post(f"{agent}/run", json=asked, timeout=30).json()["reward"] == 0.0
