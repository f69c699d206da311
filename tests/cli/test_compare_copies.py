"""`gymsdk compare` recognises the tasks of a run in its copies, wherever they are and whatever `reset` has added."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from gymsdk.jsonl import dump_row, read_rows

from .conftest import Command

pytestmark = pytest.mark.slow

OPENING = """
import itertools
from typing import Any, Literal
from gymsdk import Config, Message, Reset, State, Task, Unscorable, Verdict, hookimpl

class Settings(Config):
    bonus: float = 0.0
    judge: str = "up"

class Asked(Task):
    answer: str = ""
    notes: dict[str, Any] = {}

class Count(State):
    openings: int = 0

class Graded(Verdict):
    answer: str = ""
    extra: float = 0.0

OPENINGS = itertools.count()

async def look(place: str, state: State) -> str:
    "Look at a place."
    return place

@hookimpl
def tools():
    return [look]

@hookimpl
def tasks(split: Literal["train"], seed):
    yield from (Asked.ask("Which number?", answer=str(number), notes={"seen": []}) for number in range(12))

@hookimpl
async def reset(task: Asked):
    number = next(OPENINGS)
    task.notes["seen"].append(number)
    return Reset(state=Count(openings=number), messages=[f"This is opening {number}.", "It begins."])

@hookimpl
async def verify(task: Asked, transcript, config: Settings):
    if config.judge == "down":
        raise Unscorable("the judge is down", kind="odd")
    right = transcript.reply.strip() == task.answer
    return Graded(reward=right + config.bonus, answer=transcript.reply.strip(), extra=config.bonus)

@hookimpl
def solve(task: Asked):
    return Message(content=task.answer)
"""

PLAY = ("rollout", "openings", "--limit", 12, "-k", 2, "--model")


@pytest.fixture
def played(gymsdk: Command, installed: Callable[..., Path], workdir: Path) -> Path:
    """Return the folder of a run of an environment whose `reset` adds other messages each time, and tools."""
    installed("openings", OPENING)
    assert gymsdk(*PLAY, "scripted/oracle:0.5", "-o", "out").code == 0
    return workdir / "out"


def count_common(gymsdk: Command, first: object, second: object) -> tuple[int, float]:
    content = json.loads(gymsdk("compare", first, second, "--json").out)
    assert (content["only_a"], content["only_b"]) == (0, 0)
    return content["overall"]["tasks"], content["overall"]["difference"]


def remove_digests(path: Path) -> None:
    """Rewrite the lines as earlier versions wrote them."""
    lines = [line for _, line in read_rows(path)]
    for line in lines:
        del line["gymsdk"]["task_digest"]
    path.write_bytes(b"".join(map(dump_row, lines)))


def test_a_run_has_the_tasks_of_its_copies(gymsdk: Command, played: Path, workdir: Path) -> None:
    shutil.copy(played / "rollouts.jsonl", workdir / "copy.jsonl")
    shutil.copytree(played, workdir / "elsewhere" / "other")
    (workdir / "bare").mkdir()
    lines = (played / "rollouts.jsonl").read_bytes().splitlines(keepends=True)
    random.Random(1).shuffle(lines)
    (workdir / "bare" / "rollouts.jsonl").write_bytes(b"".join(lines))
    for copy in ("copy.jsonl", "elsewhere/other", "bare", "out/rollouts.jsonl"):
        assert count_common(gymsdk, played, copy) == (12, 0.0), copy
        assert count_common(gymsdk, copy, "copy.jsonl") == (12, 0.0), copy
    shutil.move(played, workdir / "moved")
    assert count_common(gymsdk, "moved", "copy.jsonl") == (12, 0.0)


def test_a_run_has_the_tasks_of_its_regraded_lines(gymsdk: Command, played: Path) -> None:
    assert gymsdk("reverify", played, "--set", "bonus=0.25", "-o", "new.jsonl").code == 0
    assert count_common(gymsdk, played, "new.jsonl") == (12, 0.25)
    assert gymsdk("reverify", "new.jsonl", "--set", "bonus=0.5", "-o", "newer.jsonl").code == 0
    assert count_common(gymsdk, "new.jsonl", "newer.jsonl")[0] == 12
    assert count_common(gymsdk, played, "newer.jsonl")[0] == 12


def test_a_failed_rollout_names_the_same_task(gymsdk: Command, played: Path, workdir: Path) -> None:
    digests = {
        line["_ng_task_index"]: line["gymsdk"]["task_digest"] for _, line in read_rows(played / "rollouts.jsonl")
    }
    assert len(set(digests.values())) == 12
    assert gymsdk(*PLAY, "scripted/oracle", "--set", "judge=down", "-o", "failed").code == 1
    failed = [line for _, line in read_rows(workdir / "failed" / "failures.jsonl")]
    assert len(failed) == 24
    assert {line["_ng_task_index"]: line["gymsdk"]["task_digest"] for line in failed} == digests


def test_lines_of_an_earlier_version_are_paired_with_their_copies(gymsdk: Command, played: Path, workdir: Path) -> None:
    remove_digests(played / "rollouts.jsonl")
    shutil.copy(played / "rollouts.jsonl", workdir / "copy.jsonl")
    assert count_common(gymsdk, played, "copy.jsonl") == (12, 0.0)
    assert gymsdk("reverify", played, "--set", "bonus=0.25", "-o", "new.jsonl").code == 0
    assert count_common(gymsdk, played, "new.jsonl") == (12, 0.25)


def test_lines_of_another_program_are_paired_by_the_rows_as_sent_or_by_their_prompts(
    gymsdk: Command, workdir: Path
) -> None:
    for name, offset in (("one", 0), ("two", 1)):
        lines, rows = [], []
        for task in range(5):
            row = {
                "responses_create_params": {"input": f"What is {task}?"},
                "expected_answer": str(task),
                "agent_ref": {"name": "sums_simple_agent"},
                "_ng_task_index": task,
                "_ng_rollout_index": 0,
            }
            rows.append(row)
            prompt = {"input": [{"role": "user", "content": f"What is {task}?"}]}
            verdict = {"reward": float(offset), "extracted_answer": str(offset), "length": task + offset}
            lines.append(row | {"responses_create_params": prompt, "response": {"output": []}} | verdict)
        (workdir / f"{name}.jsonl").write_bytes(b"".join(map(dump_row, lines)))
        (workdir / f"{name}_materialized_inputs.jsonl").write_bytes(b"".join(map(dump_row, rows)))
    assert count_common(gymsdk, "one.jsonl", "two.jsonl") == (5, 1.0)
    (workdir / "two_materialized_inputs.jsonl").unlink()
    (workdir / "two.jsonl").rename(workdir / "three.jsonl")
    assert count_common(gymsdk, "one.jsonl", "three.jsonl") == (5, 1.0)
