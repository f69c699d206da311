"""The fields of rows and the annotations can be filtered, grouped and read in every view of a run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gymsdk.errors import UsageError
from gymsdk.jsonl import dump_row, read_rows
from gymsdk.runs import Run, build_filter, read
from gymsdk.runs.notes import RunNotes
from gymsdk.runs.source import find_run

from .conftest import Play, run_command

OPTIONS = ("tool_call", "--split", "train", "--limit", "6", "--repeats", "2", "--model", "scripted/oracle")

FIELDS: tuple[dict[str, Any], ...] = (
    {"family": "algebra", "difficulty": 1, "tags": ["short", "easy"], "meta": {"source": "a", "year": 2020}},
    {"family": "algebra", "difficulty": 2.5, "tags": ["short"], "meta": {"source": "b"}},
    {"family": "geometry", "difficulty": 10, "tags": [], "is_new": True},
    {"family": "geometry", "difficulty": "unknown", "tags": ["ünïcode"]},
    {"family": "10", "difficulty": 10, "long": "x" * 201, "nothing": None},
    {},
)
"""The fields of the tasks' rows, by the index of the task."""


@pytest.fixture(scope="module")
def original(play: Play) -> Path:
    return play(*OPTIONS, name="fields")


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """Return a run whose rows have `FIELDS`; the rewards of the tasks are 0, 0.2, and so on."""
    folder = shutil.copytree(original, tmp_path / "fields")
    for name in ("rollouts.jsonl", "inputs.jsonl"):
        rows = [row for _, row in read_rows(folder / name)]
        changed = [row | FIELDS[row["_ng_task_index"]] for row in rows]
        if name == "rollouts.jsonl":
            changed = [row | {"reward": row["_ng_task_index"] / 5} for row in changed]
        (folder / name).write_bytes(b"".join(map(dump_row, changed)))
    return folder


@pytest.fixture
def run(folder: Path) -> Iterator[Run]:
    with read(folder) as run:
        yield run


def find_tasks(run: Run, *where: Any) -> list[int]:
    return sorted({row["task"] for row in run.list_rows(list(where))})


@pytest.mark.parametrize(
    ("condition", "tasks"),
    [
        ("row:family=algebra", [0, 1]),
        ("row:family!=algebra", [2, 3, 4, 5]),
        ("row:family=none", [5]),
        ("row:family!=none", [0, 1, 2, 3, 4]),
        ("row:family~GEO", [2, 3]),
        ("row:family=10", [4]),
        ("row:family>b", [2, 3]),
        ("row:difficulty=10", [2, 4]),
        ("row:difficulty=10.0", [2, 4]),
        ("row:difficulty<2.5", [0]),
        ("row:difficulty>=2.5", [1, 2, 4]),
        ("row:difficulty=unknown", [3]),
        ("row:tags=short", [0, 1]),
        ("row:tags=ünïcode", [3]),
        ("row:tags=none", [2, 4, 5]),
        ("row:meta.source=b", [1]),
        ("row:meta.year>2019", [0]),
        ("row:is_new=true", [2]),
        ("row:long~x", []),
        ("row:reward>0", []),
        ("row:absent=1", []),
        (("row:family", "in", ["algebra", "10"]), [0, 1, 4]),
        (("row:family", "in", [None, "algebra"]), [0, 1, 5]),
        (("row:difficulty", "in", [1, 2.5]), [0, 1]),
    ],
)
def test_conditions_on_fields_of_the_row(run: Run, condition: Any, tasks: list[int]) -> None:
    assert find_tasks(run, condition) == tasks


def test_fields_of_the_verdict_and_of_the_host_are_no_fields_of_the_row(run: Run) -> None:
    names = set(run.queries.describe_fields())
    assert {"row:family", "row:difficulty", "row:tags", "row:meta.source"} <= names
    line = run["0:0"]
    others = {"reward", "response", "gymsdk", "agent_ref", "_ng_task_index", *line["gymsdk"]["verdict"]}
    assert not names & {f"row:{name}" for name in others}


def test_groups_have_the_numbers_and_the_mean_reward(run: Run) -> None:
    groups = {group["value"]: group for group in run.group("row:family")}
    assert list(groups) == ["algebra", "geometry", "10", None]
    assert groups["algebra"] == {"value": "algebra", "rollouts": 4, "scored": 4, "mean": pytest.approx(0.1), "tasks": 2}
    assert groups[None]["rollouts"] == 2
    assert [group["value"] for group in run.group("row:difficulty")] == ["1", "2.5", "10", "unknown", None]
    tags = {group["value"]: group["rollouts"] for group in run.group("row:tags", where=["reward<0.1"])}
    assert tags == {"easy": 2, "short": 2}
    assert [(group["value"], group["rollouts"]) for group in run.group("ended")] == [("done", 12)]
    with pytest.raises(UsageError, match="row:family"):
        run.group("row:familly")


def test_annotations_are_found_as_soon_as_they_are_written(folder: Path, run: Run) -> None:
    notes = RunNotes(find_run(folder))
    notes.add({"id": "1:0", "tags": ["unclear", "hard"], "text": "What is asked?"})
    notes.add({"id": "2:1", "item": 0, "tags": ["unclear"]})
    assert run.update()
    assert [(row["task"], row["repeat"]) for row in run.list_rows(["tag=unclear"])] == [(1, 0), (2, 1)]
    assert [row["task"] for row in run.list_rows(["note~ASKED"])] == [1]
    assert len(run.list_rows(["tag=none"])) == 10
    assert {group["value"]: group["rollouts"] for group in run.group("tag")} == {"unclear": 2, "hard": 1, None: 10}
    notes.add({"id": "1:0", "tags": [], "text": ""})
    assert run.update()
    assert [row["task"] for row in run.list_rows(["tag=unclear"])] == [2]
    assert not run.update()


def test_frames_have_the_fields_as_columns(folder: Path, run: Run, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    RunNotes(find_run(folder)).add({"id": "0:0", "tags": ["odd"], "text": "see"})
    run.update()
    rows = {(row["task"], row["repeat"]): row for row in run.arrow().to_pylist()}
    assert rows[0, 0]["row:tags"] == ["easy", "short"]
    assert (rows[0, 0]["tag"], rows[0, 0]["note"], rows[0, 1]["tag"]) == (["odd"], "see", None)
    assert [rows[task, 0]["row:difficulty"] for task in range(6)] == ["1", "2.5", "10", "unknown", "10", None]
    assert [rows[task, 0]["row:meta.year"] for task in range(2)] == [2020.0, None]
    assert run.write_parquet(tmp_path / "run.parquet") == 12
    assert parquet.read_table(tmp_path / "run.parquet").num_rows == 12
    frame = run.dataframe(where=["row:family=algebra"], library="pandas")
    assert frame.groupby("row:family")["reward"].mean().to_dict() == {"algebra": pytest.approx(0.1)}


def test_a_comparison_is_grouped_by_a_field(folder: Path, original: Path, tmp_path: Path) -> None:
    other = shutil.copytree(folder, tmp_path / "other")
    rows = [row for _, row in read_rows(other / "rollouts.jsonl")]
    lines = [row | {"reward": row["reward"] + (row.get("family") == "algebra")} for row in rows]
    (other / "rollouts.jsonl").write_bytes(b"".join(map(dump_row, lines)))
    with read(folder) as first, read(other) as second:
        comparison = first.compare(second, by="row:family")
        found = {value: (group.tasks, group.difference) for value, group in comparison.groups.items()}
        assert found == {"10": (1, 0.0), "algebra": (2, 1.0), "geometry": (2, 0.0), "none": (1, 0.0)}
        with pytest.raises(UsageError, match="to group by"):
            first.compare(second, by="row:absent")
        assert first.compare(second).groups == {}


def test_facets_count_the_values_of_fields_with_few_values(run: Run) -> None:
    facets = {
        field["name"]: field["values"] for field in run.queries.count_facets(build_filter(["reward<0.3"]))["fields"]
    }
    assert facets["row:family"] == [{"value": "algebra", "count": 4, "mean": pytest.approx(0.1)}]
    assert {tag["value"]: tag["count"] for tag in facets["row:tags"]} == {"short": 4, "easy": 2}


@pytest.mark.slow
def test_commands_filter_group_and_show_fields(folder: Path, tmp_path: Path) -> None:
    RunNotes(find_run(folder)).add({"id": "0:0", "tags": ["odd"], "text": "see"})
    shown = json.loads(
        run_command("show", folder, "--where", "row:difficulty>2", "--by", "row:family", "--json").stdout
    )
    assert {row["task"] for row in shown["rollouts"]} == {1, 2, 4}
    assert [group["value"] for group in shown["groups"]] == ["10", "algebra", "geometry"]
    table = run_command("show", folder, "--by", "row:family").stdout
    [line] = (line for line in table.splitlines() if line.startswith("algebra"))
    assert line.split() == ["algebra", "4", "2", "4", "0.100"]
    transcript = run_command("show", folder, "0:0").stdout
    for line in ("tag: odd", "note: see"):
        assert f"  {line}\n" in transcript
    compared = run_command("compare", folder, folder, "--by", "row:family").stdout
    assert "algebra" in compared
    assert len(json.loads(run_command("compare", folder, folder, "--by", "row:family", "--json").stdout)["groups"]) == 4
