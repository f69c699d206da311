"""`gymsdk bench`, with text for people and JSON for programs."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from cli.conftest import StartServer
from gymsdk.bench import processes

SMALL = ("--rollouts", 8, "--concurrency", "1,3", "--split", "train")


def test_json_output_has_one_line_per_environment(gymsdk: Callable[..., Any]) -> None:
    result = gymsdk("bench", "sums", "tool_call", *SMALL, "--model", "scripted/oracle", "--json")
    assert result.code == 0, result.err
    reports = [json.loads(line) for line in result.out.splitlines()]
    assert [report["environment"] for report in reports] == ["sums", "tool_call"]
    for report in reports:
        counts = [(load["concurrency"], load["rollouts"], load["wrong"]) for load in report["loads"]]
        assert counts == [(1, 8, 0), (3, 8, 0)]
        assert report["ready"] > 0
        assert report["ready_memory"] > 20


def test_text_output_is_a_table(gymsdk: Callable[..., Any]) -> None:
    result = gymsdk("bench", "sums", *SMALL)
    assert result.code == 0, result.err
    first, second, header, *lines = result.out.splitlines()
    assert first == "sums: played by endpoint/policy, which replays scripted/oracle"
    assert second.startswith("ready in ")
    assert header.split() == ["concurrency", "1", "3"]
    assert lines.index("CPU per rollout, ms") < next(
        number for number, line in enumerate(lines) if line.startswith("  policy endpoint ")
    )
    assert any(line.split() == ["mean", "reward", "1.000", "1.000"] for line in lines)


def test_shapes_of_rollouts_are_compared_and_drawn(gymsdk: Callable[..., Any], tmp_path: Path) -> None:
    plot = tmp_path / "shapes.svg"
    result = gymsdk(
        *("bench", "--shape", "steps:2,simple,turns:3", "--rollouts", 6, "--concurrency", 2, "--plot", plot)
    )
    assert result.code == 0, result.err
    titles = [line.partition(":")[0] for line in result.out.splitlines() if ": played by " in line]
    assert titles == ["simple", "steps", "turns"]
    rows = result.out.partition("cost of a rollout by shape\n")[2].splitlines()
    assert [row.split()[0] for row in rows if row] == ["shape", "simple", "steps:2", "turns:3"]
    assert "<svg" in plot.read_text()


def test_an_open_loop_reports_the_offered_and_the_achieved_rate(gymsdk: Callable[..., Any]) -> None:
    result = gymsdk(
        *("bench", "sums", "--rate", "40,80", "--rollouts", 20, "--split", "train"),
        *("--max-outstanding", 10, "--seed", 3, "--model", "scripted/oracle", "--json"),
    )
    assert result.code == 0, result.err
    loads = json.loads(result.out)["loads"]
    assert [load["open_loop"]["rate"] for load in loads] == [40.0, 80.0]
    assert all(load["open_loop"]["achieved"] > 0 and load["open_loop"]["most"] <= 10 for load in loads)
    assert all(load["rollouts"] == 20 and load["wrong"] == 0 for load in loads)


def test_bench_measures_the_servers_of_a_head_and_reports_wrong_rewards(
    gymsdk: Callable[..., Any], start_server: StartServer
) -> None:
    head = start_server("serve", "sums", "--model", "scripted/oracle:0.5")[1]["head"]
    result = gymsdk("bench", "sums", *SMALL, "--head", head, "--json")
    assert result.code == 0, result.err
    reports = json.loads(result.out)
    assert (reports["model"], reports["ready"]) == ("scripted/oracle:0.5", None)
    assert all(load["wrong"] == 0 and "servers" in load["memory"] for load in reports["loads"])
    result = gymsdk("bench", "sums", *SMALL, "--head", head, "--model", "scripted/oracle")
    assert result.code == 1
    assert re.search(r"WRONG REWARDS: with 3 at once, [1-8] of 8 rewards differ from the recording", result.out)
    assert re.search(r"the mean is 0\.\d+, expected 1\.0000", result.out)
    result = gymsdk("bench", "math", *SMALL, "--head", head, "--model", "scripted/oracle")
    assert result.code == 1
    assert "knows no agent 'math_simple_agent'" in result.err
    assert "at once" not in result.err


def test_a_load_can_last_a_number_of_minutes(gymsdk: Callable[..., Any]) -> None:
    result = gymsdk("bench", "sums", "--minutes", 0.02, "--concurrency", 2, "--model", "scripted/oracle", "--json")
    assert result.code == 0, result.err
    [load] = json.loads(result.out)["loads"]
    assert load["seconds"] >= 1.2
    assert load["wrong"] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sums", "--concurrency", "1,999999"], "--concurrency 999999 needs more connections than this process may"),
        (["sums", "--split", "tran"], "has no split 'tran'; did you mean 'train'?"),
    ],
)
def test_wrong_input_is_rejected(gymsdk: Callable[..., Any], arguments: list[str], message: str) -> None:
    result = gymsdk("bench", *arguments)
    assert (result.code, result.out) == (2, "")
    assert message in result.err


def test_a_signal_stops_all_started_processes(start: Callable[..., subprocess.Popen[str]]) -> None:
    process = start("bench", "sums", "--minutes", 5, "--concurrency", 2)
    while "at once" not in process.stderr.readline():
        assert process.poll() is None
    children = [child.pid for child in psutil.Process(process.pid).children(recursive=True) if not child.children()]
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGINT
    assert "Traceback" not in err
    assert len(children) == 2
    deadline = time.monotonic() + 10
    while any(map(processes.is_running, children)):
        assert time.monotonic() < deadline
        time.sleep(0.02)
