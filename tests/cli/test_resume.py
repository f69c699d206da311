"""A resume refuses changed code and lines that do not belong to the run, and changes nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from sums_environment import PLAIN

from cli.conftest import Start

GRADED = f"""{PLAIN}
import helper_grade

@hookimpl
def verify():
    return Verdict(reward=helper_grade.SCORE)
"""


@pytest.mark.slow
def test_a_resume_with_another_grader_is_refused_and_force_notes_it(
    start: Start, installed: Callable[..., Path], tmp_path: Path, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(source=GRADED)
    grader = tmp_path / "helpers" / "helper_grade.py"
    grader.parent.mkdir()
    grader.write_text("SCORE = 1.0\n")
    monkeypatch.setenv("PYTHONPATH", str(grader.parent), prepend=os.pathsep)

    def run(*options: object) -> tuple[int, str]:
        process = start("rollout", "sums", "--limit", 4, "-o", "out", *options)
        return process.wait(60), process.communicate(timeout=60)[1]

    assert run() == (0, "")
    lines = (workdir / "out/rollouts.jsonl").read_bytes().splitlines(keepends=True)
    (workdir / "out/rollouts.jsonl").write_bytes(b"".join(lines[:2]))
    grader.write_text("SCORE = 8.0\n")
    about = (workdir / "out/run.json").read_bytes()
    code, err = run("--resume")
    difference = "module 'helper_grade', which environment 'sums' imports, has changed"
    assert (code, err.splitlines()) == (
        2,
        [
            "Error: the run in out differs from this command:",
            f"  {difference}",
            "resume it unchanged, or use another --output; --force continues it with the changed code",
        ],
    )
    assert (workdir / "out/run.json").read_bytes() == about
    assert run("--force")[0] == 2
    code, err = run("--resume", "--force", "--seed", 1)
    assert (code, "--seed was 0, now 1" in err, "helper_grade" in err) == (2, True, False)
    code, err = run("--resume", "--force")
    assert (code, f"--force: {difference}" in err) == (0, True)
    resumed = json.loads((workdir / "out/run.json").read_bytes())["resumed"]
    assert [resume.get("forced") for resume in resumed] == [[difference]]
    rewards = [json.loads(line)["reward"] for line in (workdir / "out/rollouts.jsonl").read_text().splitlines()]
    assert sorted(rewards) == [1.0, 1.0, 8.0, 8.0]


@pytest.mark.slow
def test_a_resume_names_the_line_and_changes_nothing(start: Start, workdir: Path) -> None:
    assert start("rollout", "sums", "--limit", 12, "-o", "out").wait(60) == 0
    path = workdir / "out/rollouts.jsonl"
    path.write_bytes(path.read_bytes() + path.read_bytes().splitlines(keepends=True)[4])
    before = {file.name: file.read_bytes() for file in (workdir / "out").iterdir()}
    process = start("rollout", "sums", "--limit", 12, "-o", "out", "--resume")
    assert (process.wait(60), "out/rollouts.jsonl:13: the line repeats task" in process.communicate()[1]) == (2, True)
    assert {file.name: file.read_bytes() for file in (workdir / "out").iterdir()} == before
