"""Stored rollouts are replayed against their environments, and continued differently from a turn."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gymsdk.jsonl import dump_row, read_rows

from .conftest import Command

Line = dict[str, Any]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "played"
    options = ("--split", "train", "--limit", "15", "--repeats", "2", "--model", "scripted/oracle:0.7", "--turns", "4")
    names = ("tool_call", "multineedle", "--set", "tool_call.calls=0,4")
    command = [sys.executable, "-m", "gymsdk", "rollout", *names, *options, "--output", str(folder)]
    subprocess.run(command, check=True, capture_output=True)
    return folder


@pytest.fixture
def run(played: Path, tmp_path: Path) -> Path:
    return shutil.copytree(played, tmp_path / "run")


def read(folder: Path) -> list[Line]:
    return [line for _, line in read_rows(folder / "rollouts.jsonl")]


def find_line(folder: Path, calls: int) -> Line:
    """Return a right rollout of tool_call with at least this many calls."""
    return next(
        line
        for line in read(folder)
        if line["gymsdk"]["environment"] == "tool_call" and line["reward"] == 1 and line["calls_made"] >= calls
    )


def change(folder: Path, name: str, edit: Any) -> None:
    """Apply *edit* to the stored line of a rollout."""
    lines = read(folder)
    for line in lines:
        if line["gymsdk"]["id"] == name:
            edit(line)
    (folder / "rollouts.jsonl").write_bytes(b"".join(map(dump_row, lines)))


def test_every_rollout_is_equal_to_the_stored_one(gymsdk: Command, run: Path) -> None:
    done = gymsdk("replay", run, "--json")
    assert done.code == 0, done.err
    results = json.loads(done.out)
    assert len(results) == 60
    assert all(result["equal"] and result["reward"] == result["stored_reward"] for result in results)
    # The episodes that a budget ended are among them.
    assert {line["gymsdk"]["ended"] for line in read(run)} == {"done", "turns"}


def test_an_environment_that_answers_differently_is_named_with_the_item(gymsdk: Command, run: Path) -> None:
    line = find_line(run, 1)
    name, opening = line["gymsdk"]["id"], line["responses_create_params"]["input"]
    index = next(n for n, item in enumerate(line["response"]["output"]) if item["type"] == "function_call_output")

    def edit(stored: Line) -> None:
        stored["response"]["output"][index]["output"] = "something else"

    change(run, name, edit)
    done = gymsdk("replay", run, name)
    assert done.code == 1
    assert f"diverged at item {len(opening) + index}" in done.out
    assert "something else" in done.out
    forced = gymsdk("replay", run, name, "--force", "--json")
    [result] = json.loads(forced.out)
    assert (result["diverged"], result["reward"], result["equal"]) == (len(opening) + index, 1.0, False)


def test_a_branch_says_something_else_and_a_model_plays_on(gymsdk: Command, run: Path, tmp_path: Path) -> None:
    line = find_line(run, 2)
    name, output = line["gymsdk"]["id"], tmp_path / "branch"
    call = {"type": "function_call", "call_id": "mine", "name": "find_notes", "arguments": '{"words": "nothing"}'}
    (tmp_path / "turn.json").write_text(json.dumps([call]))
    (tmp_path / "script.jsonl").write_text('{"text": "I give up."}')
    model = f"scripted/script:{tmp_path / 'script.jsonl'}"
    options = ("--to-turn", 1, "--say", tmp_path / "turn.json", "--then", model, "--repeats", 3)
    done = gymsdk("replay", run, name, *options, "--output", output, "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["folder"] == str(output)
    branches = read(output)
    assert len(branches) == 3
    for repeat, branch in enumerate(branches):
        items = branch["response"]["output"]
        first = line["response"]["output"]
        at = items.index(next(item for item in items if item.get("call_id") == "mine"))
        assert items[:at] == first[:at]
        assert items[at + 1]["type"] == "function_call_output"
        assert items[-1]["content"][0]["text"] == "I give up."
        assert branch["gymsdk"]["branch"] == {"run": "run", "id": name, "turn": 1, "edited": True}
        assert branch["gymsdk"]["seed"] == line["gymsdk"]["seed"]
        assert branch["gymsdk"]["id"] == f"{line['_ng_task_index']}:{repeat}"
    shown = gymsdk("show", output, f"{line['_ng_task_index']}:0")
    assert "I give up." in shown.out
    compared = gymsdk("compare", run, output, "--json")
    assert json.loads(compared.out)["overall"]["tasks"] == 1


def test_a_reply_in_a_text_file_ends_the_episode(gymsdk: Command, run: Path, tmp_path: Path) -> None:
    line = find_line(run, 1)
    (tmp_path / "reply.txt").write_text("Done.\nAnswer: 42\n")
    output = tmp_path / "branch"
    done = gymsdk("replay", run, line["gymsdk"]["id"], "--to-turn", 0, "--say", tmp_path / "reply.txt", "-o", output)
    assert done.code == 0, done.err
    [branch] = read(output)
    assert (branch["given_answer"], branch["gymsdk"]["turns"]) == ("42", 1)


def test_a_branch_without_more_to_say_fails_with_the_reason(gymsdk: Command, run: Path, tmp_path: Path) -> None:
    line = find_line(run, 2)
    call = {"type": "function_call", "call_id": "mine", "name": "find_notes", "arguments": '{"words": "nothing"}'}
    (tmp_path / "turn.json").write_text(json.dumps(call))
    options = ("--to-turn", 1, "--say", tmp_path / "turn.json", "-o", tmp_path / "branch")
    done = gymsdk("replay", run, line["gymsdk"]["id"], *options)
    assert done.code == 1
    assert "the environment goes on" in done.out
    [failure] = [line for _, line in read_rows(tmp_path / "branch" / "failures.jsonl")]
    assert failure["_ng_failure_class"] == "replay_diverged"


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ('{"type": "function_call_output", "call_id": "1", "output": "x"}', "come from the environment"),
        ("12", "expected the items of a turn"),
    ],
)
def test_a_turn_that_no_policy_can_say_is_refused(
    gymsdk: Command, run: Path, tmp_path: Path, said: str, message: str
) -> None:
    (tmp_path / "said").write_text(said)
    done = gymsdk("replay", run, "0:0", "--say", tmp_path / "said")
    assert (done.code, done.out) == (2, "")
    assert message in done.err


def test_another_reward_is_named_and_a_folder_with_a_run_is_not_overwritten(gymsdk: Command, run: Path) -> None:
    name = find_line(run, 1)["gymsdk"]["id"]
    change(run, name, lambda stored: stored.update(reward=0.25))
    done = gymsdk("replay", run, name)
    assert (done.code, "reward 1, stored 0.25" in done.out) == (1, True)
    before = (run / "rollouts.jsonl").read_bytes()
    done = gymsdk("replay", run, "0:0", "--then", "scripted/oracle", "--output", run)
    assert (done.code, "holds a run" in done.err) == (2, True)
    assert (run / "rollouts.jsonl").read_bytes() == before
