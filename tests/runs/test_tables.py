"""The tables of a run hold what its lines hold, in Arrow, Parquet, pandas and polars."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gymsdk import UsageError
from gymsdk.jsonl import read_rows
from gymsdk.runs import Run, read


def test_the_rollouts_are_a_data_frame_with_the_numbers_of_the_verdicts(run: Run, folder: Path) -> None:
    frame = run.dataframe()
    lines = [line for _, line in read_rows(folder / "rollouts.jsonl")]
    assert isinstance(frame, pytest.importorskip("pandas").DataFrame)
    assert frame["reward"].tolist() == [line["reward"] for line in lines]
    asked = frame[frame["environment"] == "tool_call"]
    assert asked["calls_needed"].tolist() == [line["calls_needed"] for line in lines if "calls_needed" in line]
    assert frame[frame["environment"] == "multineedle"]["calls_needed"].isna().all()


def test_the_messages_are_those_of_the_conversations(run: Run, folder: Path) -> None:
    frame = run.dataframe("messages", library="polars")
    pl = pytest.importorskip("polars")
    assert isinstance(frame, pl.DataFrame)
    for _, line in list(read_rows(folder / "rollouts.jsonl"))[:20]:
        rows = frame.filter(
            (pl.col("task") == line["_ng_task_index"]) & (pl.col("repeat") == line["_ng_rollout_index"])
        ).to_dicts()
        items = [*line["responses_create_params"]["input"], *line["response"]["output"]]
        assert [row["type"] for row in rows] == [item.get("type", "message") for item in items]
        assert rows[-1]["turn"] == line["gymsdk"]["turns"]
        assert rows[1]["text"] == items[1]["content"]
        assert rows[-1]["text"] == "".join(part["text"] for part in items[-1]["content"])


def test_the_tool_calls_have_their_outputs(run: Run, folder: Path) -> None:
    rows = run.arrow("tool_calls").to_pylist()
    expected = [
        (line["_ng_task_index"], item["name"], item["arguments"])
        for _, line in read_rows(folder / "rollouts.jsonl")
        for item in line["response"]["output"]
        if item["type"] == "function_call"
    ]
    assert [(row["task"], row["tool"], row["arguments"]) for row in rows] == expected
    assert all(row["output"] and row["is_error"] is False for row in rows)


def test_a_parquet_file_holds_the_chosen_rollouts(run: Run, tmp_path: Path) -> None:
    count = run.write_parquet(tmp_path / "wrong.parquet", where=["reward<1"])
    table = pytest.importorskip("pyarrow.parquet").read_table(tmp_path / "wrong.parquet")
    assert table.num_rows == count == len(run.list_rows(["reward<1"], limit=1000))
    assert max(table["reward"].to_pylist()) < 1
    with pytest.raises(UsageError, match="no rollout is chosen"):
        run.write_parquet(tmp_path / "none.parquet", where=["reward>5"])
    assert sorted(path.name for path in tmp_path.glob("*.parquet*")) == ["wrong.parquet"]


def test_the_metrics_are_a_table_with_a_row_for_each_environment_and_name(run: Run, folder: Path) -> None:
    entries = json.loads((folder / "metrics.json").read_text())
    entries[0]["agent_metrics"] |= {"vote@4/accuracy": 62.5, "majority@4/accuracy": 50.0}
    (folder / "metrics.json").write_text(json.dumps(entries))
    frame = run.dataframe("metrics")
    assert list(frame.columns) == ["environment", "metric", "value"]
    assert len(frame) == sum(len(entry["agent_metrics"]) for entry in entries)
    for entry in entries:
        own = frame[frame["environment"] == entry["environment"]]
        assert dict(zip(own["metric"], own["value"], strict=True)) == entry["agent_metrics"]
    with pytest.raises(UsageError, match="leave out the conditions"):
        run.arrow("metrics", where=["reward<1"])
    (folder / "metrics.json").unlink()
    assert run.arrow("metrics").num_rows == 0
    with pytest.raises(UsageError, match="no metrics yet"):
        run.write_parquet(folder / "metrics.parquet", "metrics")


def test_an_unknown_table_and_a_condition_that_is_no_list_are_rejected(run: Run) -> None:
    with pytest.raises(UsageError, match="no table"):
        run.arrow("nothing")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="a list"):
        run.dataframe(where="reward<1")
    assert run.arrow("messages", where=["reward>5"]).num_rows == 0
    assert len(run.dataframe(where=["reward>5"])) == 0


def test_lines_are_read_by_their_name(run: Run) -> None:
    assert run["0:1"]["gymsdk"]["id"] == "0:1"
    with pytest.raises(KeyError):
        run["9999:0"]
    with pytest.raises(KeyError):
        run["x"]
    assert [line["gymsdk"]["id"] for line in run][:3] == ["0:0", "0:1", "0:2"] or len(list(run)) == 80


def test_the_settings_and_the_metrics_of_the_run_are_there(run: Run, folder: Path) -> None:
    assert run.settings["model"] == "scripted/oracle:0.5"
    assert {entry["environment"] for entry in run.metrics} == {"multineedle", "tool_call"}
    (folder / "metrics.json").write_text("{")
    (folder / "run.json").unlink()
    assert (read(folder).metrics, read(folder).settings) == ([], {})


def test_reading_runs_imports_no_heavy_library_and_a_missing_one_is_named_with_its_extra(folder: Path) -> None:
    code = (
        f"import sys, gymsdk.runs; run = gymsdk.runs.read({str(folder)!r})\n"
        "run.list_rows(['reward<1']); print(len(run))\n"
        "assert not {'pandas', 'polars', 'pyarrow', 'numpy', 'aiohttp'} & set(sys.modules), sorted(sys.modules)\n"
        "sys.modules['pandas'] = sys.modules['polars'] = None\n"
        "run.dataframe()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, "pip install 'gymsdk[pandas]'" in done.stderr) == ("80\n", True), done.stderr
