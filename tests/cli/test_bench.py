"""`gymsdk bench`, with text for people and JSON for programs."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable
from typing import Any

import pytest

from gymsdk.bench import stage

SMALL = ("--rollouts", 8, "--concurrency", "1,3", "--split", "train")


def test_a_program_reads_a_line_of_json_for_each_environment(gymsdk: Callable[..., Any]) -> None:
    ended = gymsdk("bench", "sums", "tool_call", *SMALL, "--model", "scripted/oracle", "--json")
    assert ended.code == 0, ended.err
    found = [json.loads(line) for line in ended.out.splitlines()]
    assert [each["environment"] for each in found] == ["sums", "tool_call"]
    for each in found:
        counts = [(load["concurrency"], load["rollouts"], load["wrong"]) for load in each["loads"]]
        assert counts == [(1, 8, 0), (3, 8, 0)]
        assert each["ready"] > 0
        assert each["ready_memory"] > 20


def test_people_read_a_table(gymsdk: Callable[..., Any]) -> None:
    ended = gymsdk("bench", "sums", *SMALL)
    assert ended.code == 0, ended.err
    first, second, header, *lines = ended.out.splitlines()
    assert first == "sums: played by endpoint/policy, which replays scripted/oracle"
    assert second.startswith("ready in ")
    assert header.split() == ["at", "once", "1", "3"]
    assert any(line.startswith("CPU of the policy endpoint, ms a rollout") for line in lines)
    assert any(line.split() == ["mean", "reward", "1.000", "1.000"] for line in lines)


def _head(start: Callable[..., subprocess.Popen[str]], model: str) -> str:
    process = start("serve", "sums", "--port", 0, "--json", "--model", model)
    return str(json.loads(process.stdout.readline())["head"])


def test_bench_measures_the_servers_of_a_head(
    gymsdk: Callable[..., Any], start: Callable[..., subprocess.Popen[str]]
) -> None:
    ended = gymsdk("bench", "sums", *SMALL, "--head", _head(start, "scripted/oracle:0.5"), "--json")
    assert ended.code == 0, ended.err
    found = json.loads(ended.out)
    assert (found["model"], found["ready"]) == ("scripted/oracle:0.5", None)
    assert all(load["wrong"] == 0 and "servers" in load["memory"] for load in found["loads"])


def test_wrong_rewards_are_reported_with_exit_code_1(
    gymsdk: Callable[..., Any], start: Callable[..., subprocess.Popen[str]]
) -> None:
    ended = gymsdk("bench", "sums", *SMALL, "--head", _head(start, "scripted/null"), "--model", "scripted/oracle")
    assert ended.code == 1
    assert "WRONG REWARDS: with 3 at once, 8 of 8 rewards differ from the recording" in ended.out
    assert "the mean is 0.0000, expected 1.0000" in ended.out


def test_a_load_may_last_so_long(gymsdk: Callable[..., Any]) -> None:
    ended = gymsdk("bench", "sums", "--minutes", 0.02, "--concurrency", 2, "--model", "scripted/oracle", "--json")
    assert ended.code == 0, ended.err
    [load] = json.loads(ended.out)["loads"]
    assert load["seconds"] >= 1.2
    assert load["wrong"] == 0


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["nosuch"], "no environment named 'nosuch'"),
        (["sums", "--concurrency", "0"], "--concurrency 0: write positive integers"),
        (["sums", "--concurrency", "1,x"], "--concurrency 1,x: write positive integers"),
        (["sums", "--model", "vllm/x"], "--model vllm/x: only rewards of scripted policies can be checked"),
        (["sums", "--head", "127.0.0.1:1"], "write it as a URL"),
        (["sums", "--split", "tran"], "has no split 'tran'; did you mean 'train'?"),
    ],
)
def test_wrong_input_is_refused(gymsdk: Callable[..., Any], words: list[str], complaint: str) -> None:
    ended = gymsdk("bench", *words)
    assert (ended.code, ended.out) == (2, "")
    assert complaint in ended.err


def test_a_signal_stops_all_started_processes(start: Callable[..., subprocess.Popen[str]]) -> None:
    process = start("bench", "sums", "--minutes", 5, "--concurrency", 2)
    while "at once" not in process.stderr.readline():
        assert process.poll() is None
    children = stage.find_leaf_processes(process.pid)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGINT
    assert "Traceback" not in err
    assert len(children) == 2
    deadline = time.monotonic() + 10
    while any(map(stage.is_running, children)):
        assert time.monotonic() < deadline
        time.sleep(0.02)
