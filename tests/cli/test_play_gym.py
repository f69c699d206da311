"""`gymsdk play --gym` plays the same episodes through Gymnasium."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.conftest import Command, Start

from .test_play import TOOLS


def _run_both(gymsdk: Command, *arguments: object) -> list[tuple[int, str, str]]:
    """Return the results without and with `--gym`, without times; a chat calls the developer role `system`."""
    result = [gymsdk("play", *arguments), gymsdk("play", *arguments, "--gym")]
    return [
        (each.code, re.sub(r"\d+ ms", "", each.out).replace("developer: ", "system: "), each.err) for each in result
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ("sums", "--model", "scripted/oracle"),
        ("sums", "--model", "scripted/oracle:0.5", "--seed", 3, "--split", "test", "--task", 2),
        ("sums", "--model", "scripted/random", "--set", "digits=1"),
        ("sums", "--model", "scripted/oracle", "--set", "digits=many"),
        ("sums", "--model", "scripted/oracle", "--split", "trian"),
        ("nothing", "--model", "scripted/oracle"),
        ("multineedle", "--model", "scripted/oracle", "--seed", 2),
        ("tool_call", "--model", "scripted/random", "--task", 1),
        ("math", "--model", "scripted/echo", "--temperature", 0.5),
    ],
)
def test_the_output_equals_the_one_without_gymnasium(gymsdk: Command, arguments: tuple[object, ...]) -> None:
    plain, with_gym = _run_both(gymsdk, *arguments)
    assert plain == with_gym


def test_a_tasks_file_gives_the_same_output(gymsdk: Command, workdir: Path) -> None:
    (workdir / "tasks.jsonl").write_text('{"responses_create_params": {"input": "What is 2 + 2?"}, "answer": 4}\n')
    plain, with_gym = _run_both(gymsdk, "sums", "--tasks", "tasks.jsonl", "--model", "scripted/oracle")
    assert plain == with_gym
    assert "user: What is 2 + 2?\nassistant: 4\n" in with_gym[1]


def test_json_output_is_the_same_rollout(gymsdk: Command) -> None:
    arguments = ("play", "multineedle", "--model", "scripted/oracle", "--seed", 4, "--json")
    plain, with_gym = (json.loads(gymsdk(*arguments, *more).out) for more in ((), ("--gym",)))
    for rollout in (plain, with_gym):
        del rollout["timing"], rollout["response"]["created_at"], rollout["response"]["id"]
    assert plain == with_gym


def test_a_failure_gives_the_same_output(gymsdk: Command, installed: Callable[..., Path]) -> None:
    installed("finding", TOOLS)
    plain, with_gym = _run_both(gymsdk, "finding", "--model", "scripted/oracle")
    assert plain == with_gym
    assert with_gym[0] == 1
    assert "failed in model (no_solution): " in with_gym[1]


@pytest.mark.slow
def test_a_person_plays_through_gymnasium(start: Start, installed: Callable[..., Path]) -> None:
    installed("finding", TOOLS)
    result = []
    for more in ((), ("--gym",)):
        out, err = start("play", "finding", *more).communicate('/tools\n/call find {"what": "it"}\ndone', timeout=60)
        result.append((re.sub(r"\d+ ms", "", out), err))
    assert result[0] == result[1]
    assert "reward 1 (ended: done; 2 turns" in result[1][0]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_person_can_interrupt(start: Start, number: int, code: int) -> None:
    process = start("play", "sums", "--gym")
    assert process.stdout is not None
    while "user: " not in process.stdout.readline():
        pass
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == code
    assert err == ""
