"""The saved filters find what their rules say."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import correlation
from typing import Any

import pytest

from gymsdk.errors import UsageError
from gymsdk.jsonl import dump_row
from gymsdk.runs import Run, read
from gymsdk.runs.lenses import LENSES

Line = dict[str, Any]
Key = tuple[int, int]

TASKS, REPEATS = 60, 4


def build_lines() -> list[Line]:
    rng = random.Random(3)
    lines = []
    for task in range(TASKS):
        hard, always = task % 5 == 0, task % 7 == 0
        for repeat in range(REPEATS):
            tokens = rng.randrange(50, 5000)
            reward = float(always or (not hard and rng.random() < 0.5))
            answer = "42" if reward and task % 3 == 0 else f"answer {task}"
            components = {"brevity": -tokens / 100, "words": tokens / 100 + rng.random(), "luck": rng.random()}
            lines.append(
                {
                    "_ng_task_index": task,
                    "_ng_rollout_index": repeat,
                    "responses_create_params": {"input": f"task {task}"},
                    "response": {"output": [{"type": "message", "role": "assistant", "content": answer}]},
                    "reward": reward,
                    "reward_components": components,
                    "extracted_answer": answer,
                    "gymsdk": {
                        "id": f"{task}:{repeat}",
                        "environment": "made",
                        "outcome": "scored",
                        "ended": "done",
                        "turns": 1,
                        "seed": 1,
                        "usage": {"policy": {"total_tokens": tokens}},
                        "timing": {"total": rng.random() * 1e4},
                        "verdict": ["extracted_answer"],
                    }
                    | ({"stored_reward": 1.0 - reward if repeat == 3 else reward} if task < 10 else {}),
                }
            )
    return lines


@pytest.fixture(scope="module")
def lines() -> list[Line]:
    return build_lines()


@pytest.fixture
def made(lines: list[Line], tmp_path: Path) -> Run:
    (tmp_path / "made.jsonl").write_bytes(b"".join(map(dump_row, lines)))
    return read(tmp_path / "made.jsonl")


def key_of(line: Line) -> Key:
    return line["_ng_task_index"], line["_ng_rollout_index"]


def group(lines: list[Line]) -> dict[int, list[Line]]:
    groups = defaultdict(list)
    for line in lines:
        groups[line["_ng_task_index"]].append(line)
    return groups


def find_alike(lines: list[Line]) -> set[Key]:
    tasks = [task for task in group(lines).values() if len({line["reward"] for line in task}) == 1]
    return {key_of(line) for task in tasks for line in task}


def find_odd(lines: list[Line]) -> set[Key]:
    return {
        key_of(line)
        for task in group(lines).values()
        for line in task
        if len(others := {other["reward"] for other in task if other is not line}) == 1 and line["reward"] not in others
    }


def tokens_of(line: Line) -> int:
    number: int = line["gymsdk"]["usage"]["policy"]["total_tokens"]
    return number


def find_short(lines: list[Line]) -> set[Key]:
    limit = sorted(map(tokens_of, lines))[len(lines) // 20]
    return {key_of(line) for line in lines if line["reward"] >= 1 and tokens_of(line) < limit}


def find_common(lines: list[Line]) -> set[Key]:
    return {key_of(line) for line in lines if line["reward"] >= 1 and line["extracted_answer"] == "42"}


def find_changed(lines: list[Line]) -> set[Key]:
    return {key_of(line) for line in lines if line["gymsdk"].get("stored_reward", line["reward"]) != line["reward"]}


def find_slowest(lines: list[Line]) -> set[Key]:
    ranked = sorted(lines, key=lambda line: -line["gymsdk"]["timing"]["total"])
    return {key_of(line) for line in ranked[:3]}


EXPECTED: dict[str, Callable[[list[Line]], set[Key]]] = {
    "alike": find_alike,
    "odd": find_odd,
    "short": find_short,
    "common": find_common,
    "changed": find_changed,
    "slowest": find_slowest,
    "length": lambda lines: {key_of(line) for line in lines},
}


@pytest.mark.parametrize("name", LENSES)
def test_a_lens_finds_what_its_rule_says(made: Run, lines: list[Line], name: str) -> None:
    expected = EXPECTED[name](lines)
    assert expected, "the run has something to find"
    rows = made.list_rows(where=[f"lens={name}"], limit=1000)
    assert {(row["task"], row["repeat"]) for row in rows} == expected


def test_a_component_that_rises_with_the_length_is_named(made: Run, lines: list[Line]) -> None:
    [found] = made.queries.find_length_components()
    words = [line["reward_components"]["words"] for line in lines]
    assert found.name == "part/words"
    assert found.correlation == pytest.approx(correlation(words, list(map(tokens_of, lines))))


@pytest.mark.parametrize("name", LENSES)
def test_a_lens_finds_nothing_in_a_run_without_values(tmp_path: Path, name: str) -> None:
    line = {"response": {"output": []}, "reward": 0.0}
    (tmp_path / "bare.jsonl").write_bytes(dump_row(line))
    with read(tmp_path / "bare.jsonl") as run:
        assert run.list_rows(where=[f"lens={name}"]) == []


@pytest.mark.parametrize("condition", ["lens=nothing", "lens!=alike", "lens>3"])
def test_a_wrong_lens_is_explained(made: Run, condition: str) -> None:
    with pytest.raises(UsageError, match="with one of: alike, odd"):
        made.list_rows(where=[condition])
