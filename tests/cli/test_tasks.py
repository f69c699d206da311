from __future__ import annotations

import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest
from sums_environment import PLAIN

from cli.conftest import Command, Start
from gymsdk import load

GOOD = '{"responses_create_params": {"input": "2 + 2"}, "answer": 4, "agent_ref": {"name": "sums_simple_agent"}}\n'
SHORT = f"""{PLAIN}
@hookimpl
def tasks(split: Literal["train"]):
    print("mind the rows")
    yield Task.ask("only one")
"""


@pytest.mark.slow
def test_rows_name_their_agent_and_play_unchanged(gymsdk: Command, workdir: Path) -> None:
    result = gymsdk("tasks", "sums", "--split", "train", "-n", 3, "--seed", 7, "-o", "rows.jsonl")
    assert (result.code, result.out, result.err) == (0, "3 rows in rows.jsonl\n", "")
    rows = [json.loads(line) for line in (workdir / "rows.jsonl").read_text().splitlines()]
    assert {row["agent_ref"]["name"] for row in rows} == {"sums_simple_agent"}
    assert gymsdk("rollout", "sums", "--tasks", "rows.jsonl", "--seed", 7, "-o", "file").code == 0
    assert gymsdk("rollout", "sums", "--limit", 3, "--seed", 7, "-o", "split").code == 0
    inputs = [(workdir / name / "inputs.jsonl").read_text() for name in ("file", "split")]
    assert inputs[0] == inputs[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["math", "tool_call", "multineedle"])
async def test_python_gives_the_rows_that_the_command_writes(start: Start, name: str) -> None:
    process = start("tasks", name, "-n", 2, "--split", "train", "--seed", 3)
    written = [json.loads(line) for line in process.communicate(timeout=60)[0].splitlines()]
    environment = load(name)
    tasks = list(islice(environment.tasks("train", seed=3), 2))
    async with environment:
        assert [await environment.row(task, seed=3) for task in tasks] == written
    for row in written:
        # The environment adds these; every other field comes from the task.
        assert row.pop("agent_ref")["name"] == f"{name}_simple_agent"
        if environment.tools:
            assert row["responses_create_params"].pop("tools")
    assert [task.row() for task in tasks] == written


def test_rows_go_to_standard_output_and_those_of_several_environments_alternate(
    gymsdk: Command, installed: Callable[..., Path]
) -> None:
    installed("short", SHORT)
    result = gymsdk("tasks", "sums", "short", "-n", 3, "--set", "sums.digits=1")
    rows = [json.loads(line) for line in result.out.splitlines()]
    names = [row["agent_ref"]["name"].removesuffix("_simple_agent") for row in rows]
    assert names == ["sums", "short", "sums", "sums"]
    assert [row["number"] < 10 for row in rows if "number" in row] == [True] * 3
    assert result.err == "mind the rows\n"
    result = gymsdk("tasks", "sums")
    assert len(result.out.splitlines()) == 100
    assert result.err == "at most 100 rows of each environment; pass another number with -n N\n"


@pytest.mark.slow
def test_an_existing_file_is_replaced_only_with_overwrite(gymsdk: Command, workdir: Path) -> None:
    (workdir / "rows.jsonl").write_text("mine")
    result = gymsdk("tasks", "sums", "-n", 1, "-o", "rows.jsonl")
    assert (result.code, (workdir / "rows.jsonl").read_text()) == (2, "mine")
    assert result.err == "Error: rows.jsonl exists; replace it with --overwrite, or choose another --output\n"
    result = gymsdk("tasks", "sums", "-n", 1, "-o", "rows.jsonl", "--overwrite", "--json")
    assert json.loads(result.out) == {"output": "rows.jsonl", "rows": 1, "environments": ["sums"]}
    assert len((workdir / "rows.jsonl").read_text().splitlines()) == 1


def test_an_unfinished_file_is_removed(gymsdk: Command, installed: Callable[..., Path], workdir: Path) -> None:
    installed("breaking", SHORT.replace('("only one")', '("one")\n    raise KeyError("the second")'))
    result = gymsdk("tasks", "breaking", "-o", "rows.jsonl")
    assert (result.code, list(workdir.iterdir())) == (1, [])
    assert "hook 'tasks' raised KeyError: 'the second'" in result.err


@pytest.mark.slow
def test_a_closed_pipe_ends_the_command_quietly(start: Start) -> None:
    process = start("tasks", "sums", "-n", 100_000)
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())["answer"] > 0
    process.stdout.close()
    process.stdout = None
    _, errors = process.communicate(timeout=60)
    assert errors == ""


def test_validation_names_each_bad_line_with_its_reason(gymsdk: Command, workdir: Path) -> None:
    bad = {
        '{"broken': "not valid JSON",
        '{"responses_create_params": {"input": "?"}, "agent_ref": {"name": "sums_simple_agent"}}': "answer: Field req",
        '{"agent_ref": {"name": "summs_simple_agent"}}': "did you mean 'sums'?",
        "[1]": "expected a JSON object",
        '{"responses_create_params": {"input": "?"}}': "`agent_ref.name`",
    }
    (workdir / "rows.jsonl").write_text(GOOD + "\n".join(bad) + "\n\n" + GOOD)
    result = gymsdk("tasks", "--validate", "rows.jsonl")
    *reasons, summary = result.out.splitlines()
    for number, (reason, expected) in enumerate(zip(reasons, bad.values(), strict=True), start=2):
        assert reason.startswith(f"rows.jsonl:{number}: ")
        assert expected in reason
    assert (result.code, summary) == (1, "2 rows are valid, 2 of sums; 5 are not")
    output = json.loads(gymsdk("tasks", "--validate", "rows.jsonl", "--json").out)
    assert (output["good"], output["environments"], output["bad"][0]["line"]) == (2, {"sums": 2}, 2)


def test_a_row_without_an_agent_belongs_to_the_named_environment_and_rollouts_are_rows(
    gymsdk: Command, workdir: Path
) -> None:
    (workdir / "rows.jsonl").write_text('{"responses_create_params": {"input": "?"}, "answer": 4}\n')
    assert gymsdk("tasks", "sums", "--validate", "rows.jsonl").out == "1 rows are valid, 1 of sums; 0 are not\n"
    gymsdk("rollout", "sums", "--limit", 3, "-o", "out")
    assert gymsdk("tasks", "--validate", "out/rollouts.jsonl").code == 0


def test_rows_carry_the_tools_of_their_episodes(gymsdk: Command) -> None:
    rows = map(json.loads, gymsdk("tasks", "multineedle", "math", "-n", 1).out.splitlines())
    assert [[tool["name"] for tool in row["responses_create_params"].get("tools", [])] for row in rows] == [
        ["get_synonym_value", "extract_synonym_values"],
        [],
    ]
