"""`gymsdk show` prints runs and transcripts, and `gymsdk compare` the difference of two runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gymsdk.cli.show import clean
from gymsdk.jsonl import dump_row, read_rows

from .conftest import Command


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the indexes of a test in a separate folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "120")


def play(folder: Path, model: str) -> Path:
    options = ["tool_call", "--split", "train", "--limit", "40", "--model", model, "--output", str(folder)]
    subprocess.run([sys.executable, "-m", "gymsdk", "rollout", *options], check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return play(tmp_path_factory.mktemp("runs") / "weak", "scripted/oracle:0.5")


@pytest.fixture(scope="module")
def better(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return play(tmp_path_factory.mktemp("runs") / "strong", "scripted/oracle")


def find_line(run: Path, *, solved: bool) -> dict[str, object]:
    lines = (line for _, line in read_rows(run / "rollouts.jsonl"))
    return next(line for line in lines if (line["reward"] == 1) == solved and line["calls_needed"] > 0)


def test_a_run_is_printed_with_its_lowest_rewards_first(gymsdk: Command, run: Path) -> None:
    done = gymsdk("show", run, "--limit", "5")
    assert done.code == 0
    assert "model     scripted/oracle:0.5" in done.out
    assert "rollouts  40 of 40, 40 with a reward" in done.out
    listed = [line.split() for line in done.out.splitlines() if ":0 " in line and not line.startswith("gymsdk")]
    assert len(listed) == 5
    assert {row[1] for row in listed} == {"0"}


def test_rollouts_are_chosen_by_conditions_and_by_text(gymsdk: Command, run: Path) -> None:
    content = json.loads(gymsdk("show", run, "--where", "reward=1", "--where", "tool_calls>0", "--json").out)
    assert content["rollouts"]
    assert all(row["reward"] == 1 and row["tool_calls"] > 0 for row in content["rollouts"])
    found = json.loads(gymsdk("show", run, "--search", "I do not know.", "--limit", "1000", "--json").out)
    assert 0 < found["summary"]["rollouts"] < 40
    assert {row["reward"] for row in found["rollouts"]} == {0.0}


def test_a_transcript_is_printed_with_the_outputs_beneath_their_calls(gymsdk: Command, run: Path) -> None:
    line = find_line(run, solved=True)
    done = gymsdk("show", run, line["gymsdk"]["id"])  # type: ignore[index]
    assert done.code == 0
    items = line["response"]["output"]  # type: ignore[index]
    call = next(item for item in items if item["type"] == "function_call")
    shown = done.out.splitlines()
    at = next(number for number, each in enumerate(shown) if each.startswith(f"→ {call['name']}("))
    output = next(item for item in items if item.get("call_id") == call["call_id"] and "output" in item)
    assert output["output"][:20] in "".join(shown[at : at + 3])
    assert "reward 1 = " in done.out
    assert "kind: " in done.out


def test_the_stored_line_is_printed_as_json(gymsdk: Command, run: Path) -> None:
    line = find_line(run, solved=False)
    assert json.loads(gymsdk("show", run, line["gymsdk"]["id"], "--json").out) == line  # type: ignore[index]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["9999:0"], "has no rollout '9999:0'"),
        (["nonsense"], "has no rollout 'nonsense'"),
        (["--where", "nothing=1"], "no field 'nothing'"),
        (["--where", "rewrad=1"], "did you mean 'reward'?"),
        (["--where", "reward"], "not a condition"),
        (["--where", "reward<0,5"], "got '0,5'; write 0.5 (at position 8 of 'reward<0,5')"),
        (["--where", "tool<x"], "at position 5"),
        (["--sort", "nothing"], "no field 'nothing' to sort by"),
    ],
)
def test_wrong_input_is_explained(gymsdk: Command, run: Path, arguments: list[str], message: str) -> None:
    done = gymsdk("show", run, *arguments)
    assert (done.code, done.out) == (2, "")
    assert message in done.err


def test_a_folder_without_a_run_is_named(gymsdk: Command, tmp_path: Path) -> None:
    done = gymsdk("show", tmp_path)
    assert done.code == 2
    assert "holds no run" in done.err


def test_a_transcript_cannot_change_the_terminal(gymsdk: Command, run: Path, tmp_path: Path) -> None:
    line = find_line(run, solved=True)
    evil = "\x1b]0;title\x07\x1b[2Jhello\x9b31m \u202eevil [bold]not markup[/bold]"
    line["responses_create_params"]["input"] = evil  # type: ignore[index]
    line["kind"] = evil
    (tmp_path / "evil.jsonl").write_bytes(dump_row(line))
    listed, shown = (
        gymsdk("show", tmp_path / "evil.jsonl"),
        gymsdk("show", tmp_path / "evil.jsonl", line["gymsdk"]["id"]),
    )  # type: ignore[index]
    for done in (listed, shown):
        assert done.code == 0
        assert not {"\x1b", "\x07", "\x9b", "\u202e"} & set(done.out)
        assert "hello" in done.out
    assert "[bold]not markup[/bold]" in shown.out
    assert clean("a\tb\nc d") == "a\tb\nc d"


def test_runs_are_compared(gymsdk: Command, run: Path, better: Path) -> None:
    done = gymsdk("compare", run, better)
    assert done.code == 0
    assert "solved by B only, 0 by A only" in done.out
    [overall] = [line for line in done.out.splitlines() if line.startswith("all")]
    assert " * " in overall + " "
    content = json.loads(gymsdk("compare", run, better, "--json").out)
    assert content["overall"]["tasks"] == len(content["pairs"]) == 40
    assert content["overall"]["low"] > 0


def test_runs_without_a_common_task_are_not_compared(gymsdk: Command, run: Path, tmp_path: Path) -> None:
    other = {"responses_create_params": {"input": "Hello"}, "response": {"output": []}, "reward": 1.0}
    (tmp_path / "other.jsonl").write_bytes(dump_row(other))
    done = gymsdk("compare", run, tmp_path / "other.jsonl")
    assert (done.code, done.out) == (1, "")
    assert "the runs have no task in common" in done.err
