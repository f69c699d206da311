"""`gymsdk play --gym`: the same episodes, through Gymnasium."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.conftest import Command, Start

from .test_play import TOOLS


def _both(gymsdk: Command, *words: object) -> list[tuple[int, str, str]]:
    """How the command ends without and with `--gym`, but for its time; a chat calls the developer system."""
    ended = [gymsdk("play", *words), gymsdk("play", *words, "--gym")]
    return [(each.code, re.sub(r"\d+ ms", "", each.out).replace("developer: ", "system: "), each.err) for each in ended]


@pytest.mark.parametrize(
    "words",
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
def test_the_output_is_the_same_as_without(gymsdk: Command, words: tuple[object, ...]) -> None:
    plain, through = _both(gymsdk, *words)
    assert plain == through


def test_a_file_of_tasks_is_played_the_same(gymsdk: Command, there: Path) -> None:
    (there / "tasks.jsonl").write_text('{"responses_create_params": {"input": "What is 2 + 2?"}, "answer": 4}\n')
    plain, through = _both(gymsdk, "sums", "--tasks", "tasks.jsonl", "--model", "scripted/oracle")
    assert plain == through
    assert "user: What is 2 + 2?\nassistant: 4\n" in through[1]


def test_programs_get_the_same_rollout(gymsdk: Command) -> None:
    words = ("play", "multineedle", "--model", "scripted/oracle", "--seed", 4, "--json")
    plain, through = (json.loads(gymsdk(*words, *more).out) for more in ((), ("--gym",)))
    for each in (plain, through):
        del each["timing"], each["response"]["created_at"], each["response"]["id"]
    assert plain == through


def test_a_failure_is_printed_the_same(gymsdk: Command, installed: Callable[..., Path]) -> None:
    installed("finding", TOOLS)
    plain, through = _both(gymsdk, "finding", "--model", "scripted/oracle")
    assert plain == through
    assert through[0] == 1
    assert "failed in model (no_solution): " in through[1]


def test_a_person_plays_through_gymnasium(start: Start, installed: Callable[..., Path]) -> None:
    installed("finding", TOOLS)
    ended = []
    for more in ((), ("--gym",)):
        out, err = start("play", "finding", *more).communicate('/tools\n/call find {"what": "it"}\ndone', timeout=60)
        ended.append((re.sub(r"\d+ ms", "", out), err))
    assert ended[0] == ended[1]
    assert "reward 1 (ended: done; 2 turns" in ended[1][0]


def test_a_person_may_leave(start: Start) -> None:
    process = start("play", "sums", "--gym")
    out, _ = process.communicate("/quit\n", timeout=60)
    assert out.endswith("failed in model (person_left): the person at the terminal quit the episode\n")
    assert process.returncode == 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_person_may_interrupt(start: Start, number: int, code: int) -> None:
    process = start("play", "sums", "--gym")
    assert process.stdout is not None
    while "user: " not in process.stdout.readline():
        pass
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == code
    assert err == ""
