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
        (done.code, re.sub(r"\d+ ms", "", done.out).replace("developer: ", "system: "), done.err) for done in result
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        ("sums", "--tasks", "tasks.jsonl", "--model", "scripted/oracle"),
        ("finding", "--model", "scripted/oracle"),
        *(
            pytest.param(arguments, marks=pytest.mark.slow)
            for arguments in (
                ("sums", "--model", "scripted/oracle:0.5", "--seed", 3, "--split", "test", "--task", 2),
                ("sums", "--model", "scripted/random", "--set", "digits=1"),
                ("sums", "--model", "scripted/oracle", "--set", "digits=many"),
                ("sums", "--model", "scripted/oracle", "--split", "trian"),
                ("nothing", "--model", "scripted/oracle"),
                ("multineedle", "--model", "scripted/oracle", "--seed", 2),
                ("tool_call", "--model", "scripted/random", "--task", 1),
                ("math", "--model", "scripted/echo", "--temperature", 0.5),
            )
        ),
    ],
)
def test_the_output_equals_the_one_without_gymnasium(
    gymsdk: Command, installed: Callable[..., Path], workdir: Path, arguments: tuple[object, ...]
) -> None:
    (workdir / "tasks.jsonl").write_text('{"responses_create_params": {"input": "What is 2 + 2?"}, "answer": 4}\n')
    installed("finding", TOOLS)
    plain, with_gym = _run_both(gymsdk, *arguments)
    assert plain == with_gym
    if "--tasks" in arguments:
        assert "user: What is 2 + 2?\nassistant: 4\n" in with_gym[1]
    if "finding" in arguments:
        assert (with_gym[0], "failed in model (no_solution): " in with_gym[1]) == (1, True)


def test_json_output_is_the_same_rollout(gymsdk: Command) -> None:
    arguments = ("play", "multineedle", "--model", "scripted/oracle", "--seed", 4, "--json")
    plain, with_gym = (json.loads(gymsdk(*arguments, *more).out) for more in ((), ("--gym",)))
    for rollout in (plain, with_gym):
        del rollout["timing"], rollout["response"]["created_at"], rollout["response"]["id"]
    assert plain == with_gym


@pytest.mark.slow
def test_a_person_calls_tools_also_through_gymnasium(start: Start, installed: Callable[..., Path]) -> None:
    installed("finding", TOOLS)
    result = []
    for more in ((), ("--gym",)):
        typed = '/tools\n/nonsense\n\n/call find {"what": "it"}\ndone'
        out, err = start("play", "finding", *more).communicate(typed, timeout=60)
        result.append((re.sub(r"\d+ ms", "", out), err))
    assert result[0] == result[1]
    out, err = result[0]
    assert (out.count("`/quit` ends"), "Traceback" in err) == (2, False)
    for text in ("  find: Find something.\n    what: ", "output found it\n", "reward 1 (ended: done; 2 turns"):
        assert text in out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code", "more"),
    [(signal.SIGINT, 130, ()), (signal.SIGINT, 130, ["--gym"]), (signal.SIGTERM, 143, ["--gym"])],
)
def test_a_person_can_interrupt(start: Start, number: int, code: int, more: list[str]) -> None:
    process = start("play", "sums", *more)
    assert process.stdout is not None
    while "user: " not in process.stdout.readline():
        pass
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, "Traceback" in err) == (code, False)
