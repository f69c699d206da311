from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.conftest import Command, Start

TOOLS = '''
from typing import Literal
from gymsdk import State, Reset, Task, Verdict, hookimpl

class Kept(State):
    found: str = ""

@hookimpl
def tasks(split: Literal["train"]):
    yield Task.ask("Find it.")

@hookimpl
def reset():
    return Reset(state=Kept())

@hookimpl
def tools():
    def find(what: str, state: Kept) -> str:
        """Find something."""
        state.found = what
        return f"found {what}"

    return [find]

@hookimpl
def verify(state: Kept):
    return Verdict(reward=float(state.found == "it"))
'''


def _typed(start: Start, *words: object, text: str) -> tuple[int, str]:
    process = start("play", *words)
    out, err = process.communicate(text, timeout=60)
    assert "Traceback" not in err
    return process.returncode, out


def test_a_person_plays_by_typing(start: Start) -> None:
    code, out = _typed(start, "sums", "--set", "digits=1", text="no idea\n")
    assert "user: What is " in out
    assert "reward 0 (ended: done; 1 turn; " in out
    assert "  extracted_answer: no idea\n" in out
    assert code == 0


def test_a_person_calls_tools(start: Start, installed: Callable[..., Path]) -> None:
    installed("finding", TOOLS)
    typed = '/tools\n/nonsense\n\n/call find {"what": "it"}\ndone'
    code, out = _typed(start, "finding", text=typed)
    assert "  find: Find something.\n    what: " in out
    assert out.count("`/quit` ends") == 2
    assert "output found it\n" in out
    assert "reward 1 (ended: done; 2 turns" in out
    assert code == 0


@pytest.mark.parametrize("text", ["/quit\n", ""])
def test_a_person_may_leave(start: Start, text: str) -> None:
    code, out = _typed(start, "sums", text=text)
    assert out.endswith("failed in model (person_left): the person at the terminal quit the episode\n")
    assert code == 1


def test_a_person_may_interrupt(start: Start) -> None:
    process = start("play", "sums")
    assert process.stdout is not None
    while "user: " not in process.stdout.readline():
        pass
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in err


def test_a_model_plays_and_is_shown(gymsdk: Command) -> None:
    ended = gymsdk("play", "sums", "--model", "scripted/oracle")
    assert "user: What is " in ended.out
    assert "assistant: " in ended.out
    assert "reward 1 (ended: done; 1 turn; " in ended.out
    assert ended.code == 0


def test_programs_get_the_rollout_and_nothing_else(gymsdk: Command) -> None:
    ended = gymsdk("play", "sums", "--model", "scripted/oracle", "--json")
    assert json.loads(ended.out)["reward"] == 1.0
    assert "user: What is " in ended.err


def test_the_task_is_picked_by_number(gymsdk: Command) -> None:
    asked = {
        gymsdk("play", "sums", "--model", "scripted/null", "--task", number).out.split("\n")[0] for number in "012"
    }
    assert len(asked) == 3


def test_a_task_is_not_looked_for_without_end(gymsdk: Command) -> None:
    ended = gymsdk("play", "sums", "--model", "scripted/null", "--task", "99999999999")
    assert ended.code == 2
    assert ended.err.startswith("Error: --task 99999999999 is beyond the first 100,000 tasks of a split; pass a lower")


def test_a_file_of_tasks_is_played(gymsdk: Command, there: Path) -> None:
    (there / "tasks.jsonl").write_text('{"responses_create_params": {"input": "What is 2 + 2?"}, "answer": 4}\n')
    assert (
        "user: What is 2 + 2?\nassistant: 4\n"
        in gymsdk("play", "sums", "--tasks", "tasks.jsonl", "--model", "scripted/oracle").out
    )
    ended = gymsdk("play", "sums", "--tasks", "tasks.jsonl", "--task", "1", "--model", "scripted/oracle")
    assert ended.err == "Error: --task 1: tasks.jsonl has no task with this number; numbers start at 0\n"
    assert ended.code == 2


def test_a_failure_is_printed_with_its_stage(gymsdk: Command, installed: Callable[..., Path]) -> None:
    installed("finding", TOOLS)
    ended = gymsdk("play", "finding", "--model", "scripted/oracle")
    assert ended.out.splitlines()[-1].startswith(
        "failed in model (no_solution): environment 'finding' does not say what to do here"
    )
    assert ended.code == 1


def test_a_file_and_a_split_exclude_each_other(gymsdk: Command) -> None:
    ended = gymsdk("play", "sums", "--model", "scripted/oracle", "--tasks", "tasks.jsonl", "--split", "train")
    assert ended.err.endswith("choose one of them\n")
    assert (ended.code, ended.out) == (2, "")
