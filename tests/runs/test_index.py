"""The index holds every stored rollout, follows a growing run, and is built again when the files were replaced."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from gymsdk import GymsdkError, UsageError
from gymsdk.jsonl import dump_row, read_rows
from gymsdk.runs import Run, find_runs, read
from gymsdk.runs.index import RunIndex
from gymsdk.runs.source import find_run


def list_keys(run: Run) -> list[tuple[int, int]]:
    return [(row["task"], row["repeat"]) for row in run.list_rows(limit=1000)]


def test_every_rollout_is_indexed_with_its_values(run: Run, folder: Path) -> None:
    lines = [line for _, line in read_rows(folder / "rollouts.jsonl")]
    rows = run.list_rows(limit=1000)
    assert len(run) == len(rows) == len(lines) == 80
    for row, line in zip(rows, lines, strict=True):
        host = line["gymsdk"]
        assert (row["environment"], f"{row['task']}:{row['repeat']}") == (host["environment"], host["id"])
        assert (row["reward"], row["outcome"], row["ended"]) == (line["reward"], "scored", host["ended"])
        assert row["turns"] == host["turns"]
        assert row["tokens"] == host["usage"]["policy"]["total_tokens"]
        assert row["seconds"] == pytest.approx(host["timing"]["total"] / 1e3)
        assert row["started"] == host["timing"]["started"]
        calls = [item for item in line["response"]["output"] if item["type"] == "function_call"]
        assert row["tool_calls"] == len(calls)
        figures = run.queries.get_figures(row["id"])
        assert {
            f"part/{name}": value for name, value in line.get("reward_components", {}).items()
        }.items() <= figures.items()
        assert run.queries.read(row["id"]).line == line


def test_new_lines_are_added_and_a_line_that_is_being_written_waits(run: Run, folder: Path) -> None:
    line = run["0:0"] | {"_ng_task_index": 500}
    data = dump_row(line)
    with (folder / "rollouts.jsonl").open("ab") as file:
        file.write(data[:100])
        file.flush()
        assert not run.update()
        file.write(data[100:])
        file.flush()
        assert run.update()
    assert len(run) == 81
    assert run["500:0"] == line
    assert not run.update()


def test_a_second_reader_continues_with_the_same_index(run: Run, folder: Path, cache: Path) -> None:
    [path] = (cache / "gymsdk" / "runs").glob("*.sqlite")
    before = path.stat().st_mtime_ns
    with read(folder) as second:
        assert len(second) == 80
    assert path.stat().st_mtime_ns == before


def test_a_file_that_was_replaced_by_a_shorter_one_or_removed_is_indexed_again(run: Run, folder: Path) -> None:
    lines = (folder / "rollouts.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "part").write_bytes(b"".join(lines[40:]))
    (folder / "part").replace(folder / "rollouts.jsonl")
    run.update()
    assert list_keys(run) == [
        (line["_ng_task_index"], line["_ng_rollout_index"]) for line in map(json.loads, lines[40:])
    ]
    (folder / "rollouts.jsonl").unlink()
    run.update()
    assert len(run) == 0


def test_failures_are_indexed_and_replaced(folder: Path) -> None:
    failed = {
        "_ng_task_index": 3,
        "_ng_rollout_index": 9,
        "responses_create_params": {"input": "Hello"},
        "response": None,
        "_ng_failure_class": "model_timeout",
        "_ng_failure_stage": "model",
        "_ng_failure_message": "no answer within 5 s",
        "gymsdk": {"id": "3:9", "environment": "multineedle", "outcome": "failed", "ended": None, "turns": 0},
    }
    (folder / "failures.jsonl").write_bytes(dump_row(failed))
    run = read(folder)
    [row] = run.list_rows(["outcome=failed"])
    assert (row["reward"], row["failure"], row["stage"], row["prompt"]) == (None, "model_timeout", "model", "Hello")
    [kind] = run.queries.list_failures()
    assert (kind["kind"], kind["count"], kind["message"]) == ("model_timeout", 1, "no answer within 5 s")
    (folder / "failures.part").write_bytes(b"")
    (folder / "failures.part").replace(folder / "failures.jsonl")
    run.update()
    assert len(run) == 80


def test_a_last_line_that_was_never_finished_is_named(run: Run, folder: Path) -> None:
    path = folder / "rollouts.jsonl"
    with path.open("ab") as file:
        file.write(b'{"reward": 1')
    run.update()
    assert run.queries.list_bad_lines() == []
    os.utime(path, (1e9, 1e9))
    run.update()
    [bad] = run.queries.list_bad_lines()
    assert (bad["file"], bad["count"], bad["lines"]) == ("rollouts.jsonl", 1, [81])


def test_a_line_with_unexpected_types_is_read_as_far_as_possible(run: Run, folder: Path) -> None:
    odd = {"content": [1, {"text": 2}], "summary": 3, "output": {}, "name": 4, "arguments": None, "call_id": []}
    kinds = ("message", "reasoning", "function_call", "function_call_output", None)
    items = [odd | {"type": kind} for kind in kinds] + ["text"]
    lines = [{"response": {"output": items}, "_ng_task_index": 900}, {"response": 1, "reward": "x", "gymsdk": []}]
    with (folder / "rollouts.jsonl").open("ab") as file:
        file.writelines(map(dump_row, lines))
    run.update()
    run.index.update_texts()
    assert len(run) + sum(bad["count"] for bad in run.queries.list_bad_lines()) == 82
    assert len(run.queries.search("degrees")) > 0


def test_two_processes_index_the_same_run(folder: Path) -> None:
    code = f"import gymsdk.runs; run = gymsdk.runs.read({str(folder)!r}); run.index.update_texts(); print(len(run))"
    processes = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate()[0].strip() for process in processes] == ["80"] * 2
    with read(folder) as run:
        assert len(set(list_keys(run))) == 80


def test_indexes_that_an_interrupted_process_has_not_created_are_created_by_the_next(run: Run, folder: Path) -> None:
    assert len(run) == 80
    index = RunIndex(find_run(folder))
    with closing(sqlite3.connect(index.path)) as connection:
        connection.execute("DROP INDEX field_name")
        connection.commit()
        assert not index.update_lines()
        assert connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'field_name'").fetchall() == [(1,)]


def test_the_run_may_be_read_only_and_its_lock_is_never_taken(folder: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    folder.chmod(0o555)
    try:
        assert len(read(folder)) == 80
    finally:
        folder.chmod(0o755)
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before


@pytest.mark.parametrize("version", [4, 99])
def test_an_index_of_another_version_is_built_again(run: Run, folder: Path, version: int) -> None:
    with closing(sqlite3.connect(run.index.path)) as connection:
        connection.execute(f"PRAGMA user_version = {version}")
        connection.execute("DROP TABLE tool")
    assert len(read(folder)) == 80


def test_a_cache_folder_that_cannot_be_written_is_named(folder: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    with pytest.raises(GymsdkError, match="XDG_CACHE_HOME"):
        RunIndex(find_run(folder), blocked / "index.sqlite")


def test_the_files_of_nemo_gym_are_read(tmp_path: Path) -> None:
    output = [{"type": "function_call", "call_id": "1", "name": "add", "arguments": "{}"}, {"type": "message"}]
    rows = [
        {
            "responses_create_params": {"input": [{"role": "user", "content": f"Task {task}"}]},
            "response": {"output": output, "usage": {"total_tokens": 12}},
            "reward": float(task),
            "agent_ref": {"name": "calc_simple_agent"},
            "_ng_task_index": task,
            "_ng_rollout_index": 0,
            "accuracy": 0.5,
        }
        for task in range(2)
    ]
    (tmp_path / "calc_rollouts.jsonl").write_bytes(b"".join(map(dump_row, rows)))
    run = read(tmp_path / "calc_rollouts.jsonl")
    assert run.name == "calc_rollouts"
    first, second = run.list_rows()
    assert (first["environment"], first["reward"], first["tool_calls"], first["tokens"]) == ("calc", 0.0, 1, 12)
    assert second["prompt"] == "Task 1"
    assert run.queries.get_figures(second["id"]) == {"accuracy": 0.5}


def test_a_path_without_a_run_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no run"):
        read(tmp_path)
    with pytest.raises(UsageError, match="does not exist"):
        read(tmp_path / "missing")


def test_runs_below_a_folder_are_found_the_newest_first(folder: Path, tmp_path: Path) -> None:
    newer = tmp_path / "deep" / "newer"
    newer.mkdir(parents=True)
    (newer / "rollouts.jsonl").touch()
    os.utime(newer, (4e9, 4e9))
    assert [source.name for source in find_runs(tmp_path)] == ["newer", "copy"]
