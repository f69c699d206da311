"""`gymsdk show` prints runs and transcripts, and `gymsdk compare` the difference of two runs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from gymsdk import runs
from gymsdk.cli.show import clean
from gymsdk.jsonl import dump_row, read_rows

from .conftest import Command


def play(folder: Path, model: str) -> Path:
    options = ["tool_call", "--split", "train", "--limit", "40", "--model", model, "--output", str(folder)]
    subprocess.run([sys.executable, "-m", "gymsdk", "rollout", *options], check=True, capture_output=True)
    return folder


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Print tables in a wide terminal."""
    monkeypatch.setenv("COLUMNS", "120")


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
    at = next(number for number, line in enumerate(shown) if line.startswith(f"→ {call['name']}("))
    output = next(item for item in items if item.get("call_id") == call["call_id"] and "output" in item)
    assert output["output"][:20] in "".join(shown[at : at + 3])
    assert "reward 1 = " in done.out
    assert "kind: " in done.out
    assert json.loads(gymsdk("show", run, line["gymsdk"]["id"], "--json").out) == line  # type: ignore[index]


def test_an_unknown_field_to_group_by_is_explained_with_all_fields(gymsdk: Command, run: Path) -> None:
    done = gymsdk("show", run, "--by", "nonsense")
    listed = done.err.partition("the fields: ")[2].strip().split(", ")
    assert done.code == 2
    assert {"ended", "environment", "reward", "tool", "tag", "note"} < set(listed), done.err
    assert any(name.startswith("row:") for name in listed)
    assert len(listed) == len(set(listed))


def test_the_calls_of_a_judge_are_labelled_as_the_conversation(gymsdk: Command, run: Path, tmp_path: Path) -> None:
    line = find_line(run, solved=True)
    reply = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "It is right."}]}
    request = {"instructions": "Be strict.", "input": [{"role": "user", "content": "Is it right?"}]}
    call = {"role": "judge", "stage": "verify", "seconds": 0.25, "request": request, "answer": {"output": [reply]}}
    line["gymsdk"] |= {"environment_calls": [call]}  # type: ignore[operator]
    (tmp_path / "rollouts.jsonl").write_bytes(dump_row(line))
    shown = gymsdk("show", tmp_path, line["gymsdk"]["id"]).out  # type: ignore[index]
    parts = ["instructions", "  Be strict.", "user", "  Is it right?", "assistant", "  It is right."]
    assert [text for text in shown.partition("judge at verify, 0.25 s\n")[2].splitlines() if text][:6] == parts


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


VERBATIM = (
    "<think>\nline one\n  <b>line</b> two\n</think>\n\n<answer>42</answer>",
    "a <guess>crane</guess> [red]no markup[/red] :smile: [link]: http://x",
    "| a | b |\n|---|---|\n* item\n1. *one* __two__ `three`\n\n# Title\n---\n```python\nx = 1\n```",
    "&lt;b&gt; &amp; \\*escaped\\* <!-- comment --> $x^2$ <answer",
    "10\u00a0000 \u3000 e\u0301 👩\u200d🚀 " + "long line " * 60,
)
"""Texts that a renderer of Markdown or of markup would change."""


def write_transcript(path: Path, run: Path, items: list[dict[str, object]]) -> Path:
    line = find_line(run, solved=True)
    line["responses_create_params"]["input"] = [{"role": "user", "content": "begin"}]  # type: ignore[index]
    line["response"]["output"] = items  # type: ignore[index]
    line["gymsdk"]["id"] = "0:0"  # type: ignore[index]
    path.write_bytes(dump_row(line | {"_ng_task_index": 0, "_ng_rollout_index": 0}))
    return path


def test_a_transcript_shows_each_text_as_it_was_written(gymsdk: Command, run: Path, tmp_path: Path) -> None:
    for text in VERBATIM:
        items: list[dict[str, object]] = [
            {"type": "message", "role": "assistant", "content": text},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]},
            {"type": "function_call", "name": "look", "call_id": "c", "arguments": text},
            {"type": "function_call_output", "call_id": "c", "output": text},
        ]
        out = gymsdk("show", write_transcript(tmp_path / "one.jsonl", run, items), "0:0").out
        indented = "\n".join(f"  {line}" if line else "" for line in text.split("\n"))
        assert (out.count(f"{indented}\n"), f"look({text})" in out) == (4, True), text


def test_arguments_keep_their_numbers(gymsdk: Command, run: Path, tmp_path: Path) -> None:
    kept = ('{"x": 12345678901234567890123}', '{"x": 1.10}', '{"x": 1, "x": 2}', '{"x": 1e2}')
    items: list[dict[str, object]] = [
        {"type": "function_call", "name": "look", "call_id": str(number), "arguments": arguments}
        for number, arguments in enumerate((*kept, '{"city": "Oslo  ", "days": [1, 2.5]}'))
    ]
    out = gymsdk("show", write_transcript(tmp_path / "one.jsonl", run, items), "0:0").out
    assert [arguments for arguments in kept if f"look({arguments})" not in out] == []
    assert 'look(city="Oslo  ", days=[1,2.5])' in out


@pytest.mark.slow
def test_the_work_of_a_transcript_is_bounded_by_its_lines(gymsdk: Command, run: Path, tmp_path: Path) -> None:
    text, events = "```python\ndef f(x): return x + 1\n```\n- item\n  - [x] <y> *z* `z`\n\n", []
    # The first repeat imports modules.
    for repeats in (1, 1, 4000):
        items: list[dict[str, object]] = [
            {"type": "message", "role": "assistant", "content": text * repeats},
            {"type": "function_call", "name": "look", "call_id": "c", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": text * repeats},
        ]
        path = write_transcript(tmp_path / f"{repeats}.jsonl", run, items)
        assert gymsdk("show", path).code == 0
        counts = Counter[str]()
        sys.setprofile(lambda _frame, event, _value, counts=counts: counts.update([event]))
        try:
            done = gymsdk("show", path, "0:0")
        finally:
            sys.setprofile(None)
        assert done.out.count("def f(x)") >= 2
        events.append(counts.total())
    # A renderer of Markdown makes hundreds of calls for each line.
    assert events[2] - events[1] < 5000 + 40 * 2 * text.count("\n") * 4000


def test_a_failed_rollout_has_no_answer_and_no_figures_of_its_row(gymsdk: Command, run: Path, tmp_path: Path) -> None:
    line = find_line(run, solved=True)
    for name in ("reward", "reward_components"):
        line.pop(name, None)
    del line["gymsdk"]["verdict"]  # type: ignore[attr-defined]
    line |= {"answer": "gold", "expected_answer": "gold", "extracted_answer": "gold", "difficulty": 7, "limit": True}
    line |= {"_ng_failure_class": "model_timeout", "_ng_failure_stage": "model", "_ng_failure_message": "no answer"}
    line["gymsdk"] |= {"outcome": "failed", "ended": None}  # type: ignore[operator]
    theirs = {key: value for key, value in line.items() if key != "gymsdk"}
    (tmp_path / "rollouts.jsonl").write_bytes(dump_row(theirs | {"_ng_task_index": 1}))
    (tmp_path / "failures.jsonl").write_bytes(dump_row(line) + dump_row(theirs | {"_ng_task_index": 2}))
    with runs.read(tmp_path) as stored:
        rows = stored.list_rows()
        assert [(row["reward"], row["answer"], row["failure"]) for row in rows] == [(None, None, "model_timeout")] * 3
        assert [stored.queries.get_figures(row["id"]) for row in rows] == [{}] * 3
        assert stored.queries.list_figures() == []
        frame = stored.dataframe(library="pandas")
    assert frame["answer"].isna().all()
    assert not {"difficulty", "limit"} & set(frame.columns)
    for row in rows:
        shown = gymsdk("show", tmp_path, f"{row['task']}:{row['repeat']}").out
        assert "no reward: model_timeout at model" in shown
        assert "gold" not in shown
        assert "ended: None" not in shown
    assert "gold" not in gymsdk("show", tmp_path).out


def test_the_right_answer_of_a_foreign_row_is_not_the_given_answer(run: Path, tmp_path: Path) -> None:
    row = {"responses_create_params": {"input": "Hello"}, "response": {"output": []}, "reward": 0.0, "answer": "gold"}
    (tmp_path / "theirs.jsonl").write_bytes(dump_row(row) + dump_row(row | {"extracted_answer": "given"}))
    with runs.read(tmp_path / "theirs.jsonl") as stored:
        assert [row["answer"] for row in stored.list_rows()] == [None, "given"]
