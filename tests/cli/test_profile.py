from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from cli.conftest import Command

pytest.importorskip("matplotlib")


def test_a_profile_reports_what_training_would_learn(gymsdk: Command, there: Path) -> None:
    ended = gymsdk("profile", "sums", "--limit", 6, "-k", 4, "--model", "scripted/oracle:0.5", "-o", "out")
    lines = ended.out.splitlines()
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
    assert (there / "out" / "profile.png").read_bytes().startswith(b"\x89PNG")
    assert ended.code == 0


def test_an_empty_file_is_not_listed(gymsdk: Command, there: Path) -> None:
    ended = gymsdk("profile", "sums", "--limit", 2, "-k", 2, "-o", "out", "--no-plot")
    assert "out/rollouts.jsonl" in ended.out.splitlines()
    assert "failures.jsonl" not in ended.out
    assert (there / "out" / "failures.jsonl").read_bytes() == b""


def test_programs_get_json(gymsdk: Command, there: Path) -> None:
    ended = gymsdk("profile", "sums", "--limit", 3, "-k", 2, "-o", "out", "--no-plot", "--json")
    told = json.loads(ended.out)
    assert told == json.loads((there / "out" / "profile.json").read_text())
    assert told["verdict"]
    assert not (there / "out" / "profile.png").exists()


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
    told = json.loads(gymsdk("profile", "rich_one", "-k", 2, "--model", "scripted/oracle", "--no-plot", "--json").out)
    assert (told["maximum"], told["bands"]["medium"], told["bands"]["always right"]) == (4.0, 1, 0)


def test_a_profile_can_be_resumed(gymsdk: Command) -> None:
    words = ("profile", "sums", "--limit", 3, "-k", 2, "-o", "out", "--no-plot")
    first = gymsdk(*words)
    assert gymsdk(*words).code == 2
    assert gymsdk(*words, "--resume").out == first.out


def test_failures_come_first_and_the_exit_code_is_1(gymsdk: Command, there: Path) -> None:
    rows = [f'{{"responses_create_params": {{"input": "2 + {n}"}}, "answer": {n + 2}}}' for n in range(4)]
    (there / "tasks.jsonl").write_text("\n".join(rows))
    ended = gymsdk(
        "profile", "sums", "--tasks", "tasks.jsonl", "--set", "sulks=[2]", "--attempts", 1, "--no-plot", "-o", "out"
    )
    assert ended.out.startswith("8 of 32 rollouts have no reward: correct the failures before training.\n")
    assert "failed: bad_answer: 8" in ended.out
    assert ended.code == 1


def test_without_matplotlib_the_profile_has_no_plot_and_a_note(
    gymsdk: Command, there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    ended = gymsdk("profile", "sums", "--limit", 2, "-k", 2, "-o", "out")
    assert ended.err == "no plot is drawn because matplotlib is not installed; run `pip install 'gymsdk[plot]'`\n"
    assert (ended.code, "out/profile.json" in ended.out, "profile.png" in ended.out) == (0, True, False)
    assert (there / "out" / "profile.json").exists()
