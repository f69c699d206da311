from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from sums_environment import PLAIN

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


def test_json_output_equals_the_profile_file_and_a_profile_can_be_resumed(gymsdk: Command, workdir: Path) -> None:
    arguments = ("profile", "sums", "--limit", 3, "-k", 2, "-o", "out", "--no-plot")
    output = json.loads(gymsdk(*arguments, "--json").out)
    assert output == json.loads((workdir / "out" / "profile.json").read_text())
    assert output["verdict"]
    assert not (workdir / "out" / "profile.png").exists()
    resumed = gymsdk(*arguments, "--resume")
    assert "out/rollouts.jsonl" in resumed.out.splitlines()
    # An empty file is not listed.
    assert "failures.jsonl" not in resumed.out
    assert (workdir / "out" / "failures.jsonl").read_bytes() == b""


def test_the_maximum_reward_is_the_claimed_one(gymsdk: Command, installed: Callable[..., Path]) -> None:
    claimed = "\n@hookimpl\ndef claims():\n    return Claims(maximum=2.0)\n"
    installed("rich_one", PLAIN + claimed)
    profile = gymsdk("profile", "rich_one", "-k", 2, "--limit", 1, "--model", "scripted/oracle", "--no-plot", "--json")
    output = json.loads(profile.out)
    assert (output["maximum"], output["bands"]["medium"], output["bands"]["always right"]) == (2.0, 1, 0)


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
