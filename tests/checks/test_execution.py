"""The check of executed replies names the effects of the code and their place, and leaves nothing behind."""

from __future__ import annotations

import builtins
import os
import subprocess
import sys
import tempfile

import pytest

from checks.test_corpus import read_source
from gymsdk import Task, load, offload
from gymsdk.checks.attack import TaskView
from gymsdk.checks.execution import MARK, open_programs
from gymsdk.checks.programs import find_functions
from gymsdk.types import Claims
from gymsdk.workers.offload import use_executor
from gymsdk.workers.processes import ProcessExecutor

ID = "semantic.code_execution"

ISOLATE = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"')
"""A command that runs a program with an empty folder in the place of the folder `$0`."""


@offload(timeout=30.0)
def is_marked() -> bool:
    """Return whether the worker that runs this function has the mark."""
    return hasattr(builtins, MARK) or MARK in os.environ


def can_isolate(folder: str) -> bool:
    try:
        return subprocess.run([*ISOLATE, folder, "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("case", "effects", "place"),
    [
        ("exec", "changed the grader (gym_env_made1)", "in the process that runs gymsdk and grades all later replies"),
        ("offload", "changed the grader (gym_env_made1)", "so that the change reached the grading of later replies"),
        ("interpreter", "wrote a file and set an environment variable", "in a child process"),
        ("shell", "wrote a file", "in a child process"),
    ],
)
async def test_a_finding_says_what_executed_code_did(case, effects, place, subject, outcome):
    result = await outcome(ID, subject(read_source(f"execution_{case}")))
    [finding] = result.findings
    assert effects in finding.problem
    assert place in finding.problem
    assert "docs/safety.md" in result.fix


@pytest.mark.parametrize("case", ["exec", "offload"])
async def test_the_check_removes_its_marks_and_files(case, subject, outcome, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = set(tmp_path.iterdir())
    # The workers of this process may have imported an environment of another test that has the same name.
    with use_executor(executor := ProcessExecutor(1)):
        assert (await outcome(ID, subject(read_source(f"execution_{case}")))).findings
        assert not await is_marked()
        executor.close()
    assert not hasattr(builtins, MARK)
    assert MARK not in os.environ
    assert [name for name, module in list(sys.modules.items()) if MARK in vars(module)] == []
    assert set(tmp_path.iterdir()) == before


async def test_code_that_runs_in_a_private_mount_is_no_finding(subject, outcome, tmp_path, monkeypatch):
    folder = str(tmp_path)
    if not can_isolate(folder):
        pytest.skip("this user cannot create mount namespaces")
    monkeypatch.setattr(tempfile, "tempdir", folder)
    run = "[sys.executable, "
    source = read_source("execution_interpreter")
    isolated = source.replace(run, f"[*{ISOLATE!r}, {folder!r}, sys.executable, ")
    assert isolated != source
    assert (await outcome(ID, subject(source))).findings
    assert not (await outcome(ID, subject(isolated))).findings


@pytest.mark.parametrize(
    ("prompt", "functions"),
    [
        ("Write a function `add(a, b)` that adds.", {"add": "(a, b)"}),
        (
            "Complete:\n\ndef scale(values: list[int], by: int = 2) -> list[int]:\n    ...",
            {"scale": "(values: list[int], by: int = 2) -> list[int]"},
        ),
        ("Write a function called is_prime. It gets a number.", {"is_prime": "(*args, **kwargs)"}),
        ("Define the function `top`.", {"top": "(*args, **kwargs)"}),
        ("What is 2 + 2?", dict.fromkeys(("solve", "solution", "main", "f"), "(*args, **kwargs)")),
    ],
)
def test_functions_are_found_in_the_prompt(prompt, functions):
    assert find_functions(prompt) == functions


def test_a_record_is_complete_or_missing() -> None:
    """A grader may stop the program of a reply at any time; here it cannot write."""
    with open_programs(load("math")) as programs:
        payload = programs.add(
            "a reply", TaskView(Task(responses_create_params={"input": "?"}), Claims(), [], []), lambda _: []
        )
        subprocess.run(["sh", "-c", f"ulimit -f 0; {payload.command}"], check=False, stderr=subprocess.DEVNULL)
        assert programs.list_executions() == []
        subprocess.run(payload.command, shell=True, check=True)
        assert len(programs.list_executions()) == 1
