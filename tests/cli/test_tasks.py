from __future__ import annotations

import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest

from cli.conftest import Command, Start
from gymsdk import load

GOOD = '{"responses_create_params": {"input": "2 + 2"}, "answer": 4, "agent_ref": {"name": "sums_simple_agent"}}\n'


def test_rows_name_their_agent_and_play_unchanged(gymsdk: Command, there: Path) -> None:
    ended = gymsdk("tasks", "sums", "--split", "train", "-n", 3, "--seed", 7, "-o", "rows.jsonl")
    assert (ended.code, ended.out, ended.err) == (0, "3 rows in rows.jsonl\n", "")
    rows = [json.loads(line) for line in (there / "rows.jsonl").read_text().splitlines()]
    assert {row["agent_ref"]["name"] for row in rows} == {"sums_simple_agent"}
    assert gymsdk("rollout", "sums", "--tasks", "rows.jsonl", "--seed", 7, "-o", "file").code == 0
    assert gymsdk("rollout", "sums", "--limit", 3, "--seed", 7, "-o", "split").code == 0
    sent = [(there / name / "inputs.jsonl").read_text() for name in ("file", "split")]
    assert sent[0] == sent[1]


@pytest.mark.parametrize("name", ["math", "tool_call", "multineedle"])
async def test_python_gives_the_rows_that_the_command_writes(start: Start, name: str) -> None:
    process = start("tasks", name, "-n", 2, "--split", "train", "--seed", 3)
    written = [json.loads(line) for line in process.communicate(timeout=60)[0].splitlines()]
    environment = load(name)
    drawn = list(islice(environment.tasks("train", seed=3), 2))
    async with environment:
        assert [await environment.row(task, seed=3) for task in drawn] == written
    for row in written:
        # The environment adds these; everything else is the task's own.
        assert row.pop("agent_ref")["name"] == f"{name}_simple_agent"
        if environment.tools:
            assert row["responses_create_params"].pop("tools")
    assert [task.row() for task in drawn] == written


def test_rows_go_to_standard_output_by_default(gymsdk: Command) -> None:
    ended = gymsdk("tasks", "sums", "-n", 2, "--set", "digits=1")
    assert [json.loads(line)["number"] < 10 for line in ended.out.splitlines()] == [True, True]
    assert ended.err == ""


def test_rows_of_several_environments_alternate(gymsdk: Command, installed: Callable[..., Path]) -> None:
    short = """
from typing import Literal
from gymsdk import Task, Verdict, hookimpl

@hookimpl
def tasks(split: Literal["train"]):
    print("mind the rows")
    yield Task.ask("only one")

@hookimpl
def verify():
    return Verdict(reward=1.0)
"""
    installed("short", short)
    ended = gymsdk("tasks", "sums", "short", "-n", 3, "--set", "sums.digits=2")
    names = [json.loads(line)["agent_ref"]["name"].removesuffix("_simple_agent") for line in ended.out.splitlines()]
    assert names == ["sums", "short", "sums", "sums"]
    assert ended.err == "mind the rows\n"


def test_an_existing_file_is_replaced_only_with_overwrite(gymsdk: Command, there: Path) -> None:
    (there / "rows.jsonl").write_text("mine")
    ended = gymsdk("tasks", "sums", "-n", 1, "-o", "rows.jsonl")
    assert (ended.code, (there / "rows.jsonl").read_text()) == (2, "mine")
    assert ended.err == "Error: rows.jsonl exists; replace it with --overwrite, or choose another --output\n"
    assert gymsdk("tasks", "sums", "-n", 1, "-o", "rows.jsonl", "--overwrite").code == 0
    assert len((there / "rows.jsonl").read_text().splitlines()) == 1


def test_nothing_is_left_of_a_file_that_could_not_be_finished(
    gymsdk: Command, installed: Callable[..., Path], there: Path
) -> None:
    breaking = """
from typing import Literal
from gymsdk import Task, Verdict, hookimpl

@hookimpl
def tasks(split: Literal["train"]):
    yield Task.ask("one")
    raise KeyError("the second")

@hookimpl
def verify():
    return Verdict(reward=1.0)
"""
    installed("breaking", breaking)
    ended = gymsdk("tasks", "breaking", "-o", "rows.jsonl")
    assert (ended.code, list(there.iterdir())) == (1, [])
    assert "hook 'tasks' raised KeyError: 'the second'" in ended.err
    assert gymsdk("tasks", "sums", "-o", "no/rows.jsonl").code == 2


def test_the_default_limit_is_reported(gymsdk: Command) -> None:
    ended = gymsdk("tasks", "sums")
    assert len(ended.out.splitlines()) == 100
    assert ended.err == "at most 100 rows of each environment; pass another number with -n N\n"


def test_a_closed_pipe_ends_the_command_quietly(start: Start) -> None:
    process = start("tasks", "sums", "-n", 100_000)
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())["answer"] > 0
    process.stdout.close()
    process.stdout = None
    _, told = process.communicate(timeout=60)
    assert told == ""


def test_a_check_names_each_bad_line_with_its_reason(gymsdk: Command, there: Path) -> None:
    bad = ['{"broken', '{"responses_create_params": {"input": "?"}, "agent_ref": {"name": "sums_simple_agent"}}']
    bad += ['{"agent_ref": {"name": "summs_simple_agent"}}', "[1]", '{"responses_create_params": {"input": "?"}}']
    (there / "rows.jsonl").write_text(GOOD + "\n".join(bad) + "\n\n" + GOOD)
    ended = gymsdk("tasks", "--validate", "rows.jsonl")
    reasons = [line.partition(": ")[::2] for line in ended.out.splitlines()]
    assert [place for place, _ in reasons[:-1]] == [f"rows.jsonl:{number}" for number in range(2, 7)]
    for (_, reason), words in zip(
        reasons,
        [
            "not valid JSON",
            "answer: Field required",
            "did you mean 'sums'?",
            "expected a JSON object",
            "`agent_ref.name`",
        ],
        strict=False,
    ):
        assert words in reason
    assert ended.out.splitlines()[-1] == "2 rows are valid, 2 of sums; 5 are not"
    assert ended.code == 1


def test_a_row_without_an_agent_belongs_to_the_named_environment(gymsdk: Command, there: Path) -> None:
    (there / "rows.jsonl").write_text('{"responses_create_params": {"input": "?"}, "answer": 4}\n')
    assert gymsdk("tasks", "sums", "--validate", "rows.jsonl").out == "1 rows are valid, 1 of sums; 0 are not\n"


def test_a_finished_runs_lines_are_rows_that_fit(gymsdk: Command) -> None:
    gymsdk("rollout", "sums", "--limit", 3, "-o", "out")
    assert gymsdk("tasks", "--validate", "out/rollouts.jsonl").code == 0


def test_programs_get_a_check_as_json(gymsdk: Command, there: Path) -> None:
    (there / "rows.jsonl").write_text(f"{GOOD}null\n")
    told = json.loads(gymsdk("tasks", "--validate", "rows.jsonl", "--json").out)
    assert (told["good"], told["environments"], told["bad"][0]["line"]) == (1, {"sums": 1}, 2)
    told = json.loads(gymsdk("tasks", "sums", "-n", 2, "-o", "new.jsonl", "--json").out)
    assert told == {"output": "new.jsonl", "rows": 2, "environments": ["sums"]}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "Missing argument 'NAME'"),
        (["summs"], "no environment named 'summs'"),
        (["sums", "--split", "trian"], "no split 'trian'"),
        (["--validate", "none.jsonl"], "none.jsonl: No such file"),
        (["--validate", "none.jsonl", "--set", "digits=1"], "name the environment of the setting"),
        (["sums", "-n", "0"], "Invalid value for '--limit'"),
        (["sums", "-o", "."], "is a folder"),
    ],
)
def test_wrong_input_is_reported_in_one_sentence(gymsdk: Command, words: list[str], told: str) -> None:
    ended = gymsdk("tasks", *words)
    assert ended.code == 2
    assert told in ended.err.splitlines()[-1]


def test_rows_carry_the_tools_their_episodes_offer(gymsdk: Command) -> None:
    rows = map(json.loads, gymsdk("tasks", "multineedle", "math", "-n", 1).out.splitlines())
    assert [[tool["name"] for tool in row["responses_create_params"].get("tools", [])] for row in rows] == [
        ["get_synonym_value", "extract_synonym_values"],
        [],
    ]
