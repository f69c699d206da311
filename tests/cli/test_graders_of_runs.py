"""A run names its grader, and its rewards are not mixed with those of another."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RUN = ("rollout", "math", "--split", "example", "--limit", "2", "--model", "scripted/oracle")


@pytest.fixture
def played(gymsdk: Callable[..., Any], tmp_path: Path) -> Path:
    folder = tmp_path / "out"
    assert gymsdk(*RUN, "--output", str(folder)).code == 0
    return folder


def rewrite(folder: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    path = folder / "rollouts.jsonl"
    lines = [change(json.loads(line)) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_reverify_refuses_another_version_of_the_grader(gymsdk: Callable[..., Any], played: Path) -> None:
    rewrite(played, lambda line: line | {"grader_version": "0"})
    refused = gymsdk("reverify", str(played))
    assert refused.code == 2
    assert "line 1 was graded by gymsdk.graders.maths 0, and math grades with gymsdk.graders.maths 1 now" in refused.err
    assert "--force" in refused.err
    assert gymsdk("reverify", str(played), "--force").code == 0


def test_reverify_of_a_run_without_a_grader_asks_for_a_choice(gymsdk: Callable[..., Any], played: Path) -> None:
    rewrite(played, lambda line: {key: value for key, value in line.items() if not key.startswith("grader")})
    refused = gymsdk("reverify", str(played))
    assert (refused.code, "line 1 names no grader" in refused.err) == (2, True)
    assert gymsdk("reverify", str(played), "--set", "grader=gymsdk").code == 0


def test_a_resume_names_both_graders(gymsdk: Callable[..., Any], played: Path) -> None:
    about = json.loads((played / "run.json").read_text())
    about["settings"]["environments"]["math"]["imports"]["gymsdk.graders.maths"] = "gymsdk.graders.maths/0"
    (played / "run.json").write_text(json.dumps(about))
    refused = gymsdk(*RUN, "--output", str(played), "--resume")
    assert refused.code == 2
    expected = "the grader of environment 'math' was gymsdk.graders.maths/0, now gymsdk.graders.maths/1"
    assert expected in " ".join(refused.err.split())
