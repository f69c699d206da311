from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from sums_environment import PLAIN

from cli.conftest import Command, Start

TOOLS = f'''{PLAIN}
class Kept(State):
    found: str = ""

@hookimpl
def reset():
    return Reset(state=Kept())

@hookimpl
def tools():
    def find(what: str, state: Kept) -> str:
        """Find something."""
        state.found = what
        return f"found {{what}}"

    return [find]

@hookimpl
def verify(state: Kept):
    return Verdict(reward=float(state.found == "it"))

del solve
'''


def _play_typed(start: Start, *arguments: object, text: str) -> tuple[int, str]:
    process = start("play", *arguments)
    out, err = process.communicate(text, timeout=60)
    assert "Traceback" not in err
    return process.returncode, out


@pytest.mark.slow
def test_a_person_plays_by_typing(start: Start) -> None:
    code, out = _play_typed(start, "sums", "--set", "digits=1", text="no idea\n")
    assert "user: What is " in out
    assert "reward 0 (ended: done; 1 turn; " in out
    assert "  extracted_answer: no idea\n" in out
    assert code == 0


@pytest.mark.slow
@pytest.mark.parametrize("text", ["/quit\n", ""])
def test_a_person_can_quit(start: Start, text: str) -> None:
    code, out = _play_typed(start, "sums", text=text)
    assert out.endswith("failed in model (person_left): the person at the terminal quit the episode\n")
    assert code == 1


def test_a_model_plays_and_its_messages_are_shown(gymsdk: Command) -> None:
    result = gymsdk("play", "sums", "--model", "scripted/oracle")
    assert "user: What is " in result.out
    assert "assistant: " in result.out
    assert "reward 1 (ended: done; 1 turn; " in result.out
    assert result.code == 0
    result = gymsdk("play", "sums", "--model", "scripted/oracle", "--json")
    assert json.loads(result.out)["reward"] == 1.0
    assert "user: What is " in result.err


def test_the_task_option_selects_a_task_by_number(gymsdk: Command) -> None:
    questions = {
        gymsdk("play", "sums", "--model", "scripted/null", "--task", number).out.split("\n")[0] for number in "012"
    }
    assert len(questions) == 3


def test_a_tasks_file_can_be_played(gymsdk: Command, workdir: Path) -> None:
    (workdir / "tasks.jsonl").write_text('{"responses_create_params": {"input": "What is 2 + 2?"}, "answer": 4}\n')
    assert (
        "user: What is 2 + 2?\nassistant: 4\n"
        in gymsdk("play", "sums", "--tasks", "tasks.jsonl", "--model", "scripted/oracle").out
    )
    result = gymsdk("play", "sums", "--tasks", "tasks.jsonl", "--task", "1", "--model", "scripted/oracle")
    assert result.err == "Error: --task 1: tasks.jsonl has no task with this number; numbers start at 0\n"
    assert result.code == 2


def test_a_failure_is_printed_with_its_stage(gymsdk: Command, installed: Callable[..., Path]) -> None:
    installed("finding", TOOLS)
    result = gymsdk("play", "finding", "--model", "scripted/oracle")
    assert result.out.splitlines()[-1].startswith(
        "failed in model (no_solution): environment 'finding' provides no solution for this turn"
    )
    assert result.code == 1
