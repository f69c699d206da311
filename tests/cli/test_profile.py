from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from cli.conftest import Command

pytest.importorskip("matplotlib")


@pytest.mark.slow
def test_a_profile_reports_what_training_would_learn(gymsdk: Command, workdir: Path) -> None:
    result = gymsdk("profile", "sums", "--limit", 6, "-k", 4, "--model", "scripted/oracle:0.5", "-o", "out")
    lines = result.out.splitlines()
    assert lines[0].startswith("Ready to train: ")
    for start in (
        "mean reward",
        "pass@1",
        "pass@4",
        "groups all alike",
        "tasks",
        "  hard",
        "verify",
        "tokens per turn",
    ):
        assert any(line.startswith(start) for line in lines)
    assert lines[-6:-3] == ["out/profile.json", "out/profile.png", "out/rollouts.jsonl"]
    assert (workdir / "out" / "profile.png").read_bytes().startswith(b"\x89PNG")
    assert result.code == 0


def test_an_empty_file_is_not_listed(gymsdk: Command, workdir: Path) -> None:
    result = gymsdk("profile", "sums", "--limit", 2, "-k", 2, "-o", "out", "--no-plot")
    assert "out/rollouts.jsonl" in result.out.splitlines()
    assert "failures.jsonl" not in result.out
    assert (workdir / "out" / "failures.jsonl").read_bytes() == b""


def test_json_output_equals_the_profile_file(gymsdk: Command, workdir: Path) -> None:
    result = gymsdk("profile", "sums", "--limit", 3, "-k", 2, "-o", "out", "--no-plot", "--json")
    output = json.loads(result.out)
    assert output == json.loads((workdir / "out" / "profile.json").read_text())
    assert output["verdict"]
    assert not (workdir / "out" / "profile.png").exists()


def test_the_maximum_reward_is_the_claimed_one(gymsdk: Command, installed: object) -> None:
    source = """
from typing import Literal
from gymsdk import Claims, Message, Task, Verdict, hookimpl

@hookimpl
def tasks(split: Literal["train"]):
    yield Task.ask("?")

@hookimpl
def verify():
    return Verdict(reward=2.0)

@hookimpl
def solve():
    return Message(content="!")

@hookimpl
def claims():
    return Claims(maximum=4.0)
"""
    assert callable(installed)
    installed("rich_one", source)
    output = json.loads(gymsdk("profile", "rich_one", "-k", 2, "--model", "scripted/oracle", "--no-plot", "--json").out)
    assert (output["maximum"], output["bands"]["medium"], output["bands"]["always right"]) == (4.0, 1, 0)


def test_a_profile_can_be_resumed(gymsdk: Command) -> None:
    arguments = ("profile", "sums", "--limit", 3, "-k", 2, "-o", "out", "--no-plot")
    first = gymsdk(*arguments)
    assert gymsdk(*arguments).code == 2
    assert gymsdk(*arguments, "--resume").out == first.out


def test_failures_come_first_and_the_exit_code_is_1(gymsdk: Command, workdir: Path) -> None:
    rows = [f'{{"responses_create_params": {{"input": "2 + {n}"}}, "answer": {n + 2}}}' for n in range(4)]
    (workdir / "tasks.jsonl").write_text("\n".join(rows))
    result = gymsdk(
        "profile", "sums", "--tasks", "tasks.jsonl", "--set", "sulks=[2]", "--attempts", 1, "--no-plot", "-o", "out"
    )
    assert result.out.startswith("8 of 32 rollouts have no reward: correct the failures before training.\n")
    assert "failed: bad_answer: 8" in result.out
    assert result.code == 1


def test_without_matplotlib_the_profile_has_no_plot_and_a_note(
    gymsdk: Command, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = gymsdk("profile", "sums", "--limit", 2, "-k", 2, "-o", "out")
    assert result.err == "no plot is drawn because matplotlib is not installed; run `pip install 'gymsdk[plot]'`\n"
    assert (result.code, "out/profile.json" in result.out, "profile.png" in result.out) == (0, True, False)
    assert (workdir / "out" / "profile.json").exists()
