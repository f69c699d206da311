"""Every reader takes the same reward from a stored line: masked, skipped, failed or not finite is no reward."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx
import pytest
from studio.conftest import start_viewer

from gymsdk import client
from gymsdk.errors import EpisodeError
from gymsdk.jsonl import dump_row, parse_json, read_rows
from gymsdk.line import StoredRollout
from gymsdk.rollouts.export import ExportReport, export_sft
from gymsdk.rollouts.folder import RunFolder
from gymsdk.rollouts.profile import build_profile
from gymsdk.rollouts.reverify import Reverified, StoredRun
from gymsdk.rollouts.settings import Selection
from gymsdk.runs import read
from gymsdk.runs.records import parse_record

from .conftest import RIGHT, run_command

CHANGES: tuple[tuple[dict[str, Any], float | None], ...] = (
    ({}, 1.0),
    ({"reward": 0}, 0.0),
    ({"reward": True}, 1.0),
    ({"reward": False}, 0.0),
    ({"reward": -2.5}, -2.5),
    ({"reward": 10**30}, 1e30),
    ({"reward": 10**400}, None),
    ({"reward": "1.0"}, None),
    ({"reward": None}, None),
    ({"reward": [1.0]}, None),
    ({"reward": {"value": 1.0}}, None),
    ({"mask_sample": True}, None),
    ({"mask_sample": False}, 1.0),
    ({"mask_sample": 1}, None),
    ({"mask_sample": True, "failure_kind": "too_long"}, None),
    ({"verification_skipped": True}, None),
    ({"verification_skipped": False}, 1.0),
    ({"_ng_failure_class": "judge_failed"}, None),
    ({"_ng_failure_class": None}, 1.0),
    ({"failure_kind": "odd"}, 1.0),
)
"""Changes of a line with the reward 1.0, and the reward of the changed line."""


def build_line(changes: dict[str, Any], *, own: bool) -> dict[str, Any]:
    """Return a line of gymsdk's, or of NeMo Gym's, with *changes*."""
    message = {"type": "message", "role": "assistant", "content": "4"}
    line = {
        "responses_create_params": {"input": "2 + 2"},
        "response": {"id": "r", "object": "response", "output": [message]},
        "reward": 1.0,
        "agent_ref": {"name": "sums_simple_agent"},
    }
    host_fields = {
        "id": "0:0",
        "environment": "sums",
        "seed": 1,
        "outcome": "scored",
        "ended": "done",
        "turns": 1,
        "verdict": ["grader_timeout"],
        "usage": {},
        "timing": {"stages": {}},
    }
    return line | changes | ({"gymsdk": host_fields, "grader_timeout": False} if own else {})


def read_verdict(line: dict[str, Any]) -> float | None:
    try:
        return client.parse_verdict(line, {}).reward
    except EpisodeError:
        return None


def read_exported(line: dict[str, Any]) -> float | None:
    lines = export_sft([StoredRollout(line)], Selection(min_reward=-math.inf), ExportReport())
    return next((exported["reward"] for exported in lines), None)


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize(
    "absent", [{"reward": math.nan}, {"reward": math.inf}, {"gymsdk": {"outcome": "failed"}}, {"reward": ...}]
)
def test_a_reward_that_is_missing_or_that_json_cannot_hold_is_none(absent: dict[str, Any], own: bool) -> None:
    line = build_line({}, own=own) | absent
    line = {key: value for key, value in line.items() if value is not ...}
    assert StoredRollout(line).reward is None
    assert [read_verdict(line), parse_record(StoredRollout(line)).reward, StoredRollout(line).reward] == [None] * 3


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize(("changes", "expected"), CHANGES)
def test_the_readers_of_one_line_agree(changes: dict[str, Any], expected: float | None, own: bool) -> None:
    line = build_line(changes, own=own)
    record = parse_record(StoredRollout(line, number=6))
    profile = build_profile("sums", "m", [StoredRollout(line, number=6)]) if own else None
    found = {
        "record": record.reward,
        "reverify": StoredRollout(line, number=6).reward,
        "verdict": read_verdict(line),
        "export": read_exported(line),
        "profile": expected if profile is None else (profile.reward.value if profile.reward else None),
    }
    assert found == dict.fromkeys(found, expected)
    assert {type(value) for value in found.values()} == {type(expected)}, "`true` is a number, not a Boolean"
    assert record.outcome != "scored" if expected is None else record.outcome == "scored"
    assert bool(record.failure[0]) == (expected is None)
    assert (record.task, StoredRollout(line, number=6).task) == (6, 6)


def test_a_mask_of_the_environments_own_verdict_does_not_remove_its_reward() -> None:
    line = build_line({"mask_sample": True}, own=True)
    line["gymsdk"]["verdict"] = ["mask_sample"]
    readers = (parse_record(StoredRollout(line)).reward, StoredRollout(line).reward, read_verdict(line))
    assert readers == (1.0, 1.0, 1.0)


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("change", [change for change, reward in CHANGES if reward is None])
def test_a_line_that_is_graded_again_has_a_reward(change: dict[str, Any], own: bool) -> None:
    verdict = client.RemoteVerdict(0.5, {}, {"extracted_answer": "4"})
    line = Reverified(StoredRollout(build_line(change, own=own)), verdict).build_line()
    assert line is not None
    assert StoredRollout(line).reward == 0.5
    assert "stored_reward" not in line.get("gymsdk", {})


@pytest.mark.parametrize("names", [None, 5, "grader_timeout", {"a": 1}, [["a"]], [{}, 5, None, "absent"]])
def test_a_damaged_list_of_the_verdicts_fields_ends_no_reader(names: Any) -> None:
    line = build_line({}, own=True)
    line["gymsdk"]["verdict"] = names
    regraded = Reverified(StoredRollout(line), client.RemoteVerdict(0.5, {}, {})).build_line()
    assert regraded is not None
    readers = (parse_record(StoredRollout(line)).reward, StoredRollout(line).reward, read_verdict(line))
    assert (*readers, StoredRollout(regraded).reward) == (1.0, 1.0, 1.0, 0.5)


@pytest.fixture
def changed(original: Path, tmp_path: Path) -> tuple[Path, dict[int, float | None]]:
    """Return a run with one changed line for each case, and the expected rewards by task."""
    folder = shutil.copytree(original, tmp_path / "changed")
    expected: dict[int, float | None] = {}
    lines = []
    for (_, line), (changes, reward) in zip(read_rows(original / "rollouts.jsonl"), CHANGES, strict=True):
        expected[line["_ng_task_index"]] = reward
        lines.append(line | {"reward": 1.0} | changes)
    (folder / "rollouts.jsonl").write_bytes(b"".join(map(dump_row, lines)))
    return folder, expected


@pytest.fixture
def viewer(changed: tuple[Path, Any], tmp_path: Path) -> Iterator[httpx.Client]:
    with start_viewer(changed[0], cache=tmp_path / "viewer" / "cache") as started, started.client() as opened:
        yield opened


@pytest.mark.slow
def test_commands_viewer_frames_and_metrics_agree(
    changed: tuple[Path, dict[int, float | None]], original: Path, viewer: httpx.Client
) -> None:
    folder, expected = changed
    scored = {task: reward for task, reward in expected.items() if reward is not None}

    shown = json.loads(run_command("show", folder, "--limit", 100, "--json").stdout)
    assert {row["task"]: row["reward"] for row in shown["rollouts"]} == expected
    assert (shown["summary"]["rollouts"], shown["summary"]["scored"]) == (len(expected), len(scored))

    with read(folder) as run:
        frame = run.dataframe(library="pandas")
    rewards = {row.task: None if math.isnan(row.reward) else row.reward for row in frame.itertuples()}
    assert rewards == expected

    pairs = json.loads(run_command("compare", folder, original, "--json").stdout)["pairs"]
    assert {pair["task_a"]: pair["a"] for pair in pairs} == scored

    rows = viewer.get(f"/api/runs/{folder.name}/rows").json()["rows"]
    assert {row["task"]: row["reward"] for row in rows} == expected
    for task, reward in expected.items():
        answer = viewer.get(f"/api/runs/{folder.name}/rollouts/{task}:0").json()
        assert answer["row"]["reward"] == reward

    assert {stored.task: stored.reward for stored in StoredRun(folder).iter_rollouts()} == expected
    progress = RunFolder(folder).read_progress()
    assert (progress.scored, progress.failed) == (len(scored), len(expected) - len(scored))

    assert run_command("rollout", *RIGHT, "--output", folder, "--resume").returncode in {0, 1}
    [metrics] = parse_json((folder / "metrics.json").read_bytes())
    assert metrics["outcomes"]["scored"] == len(scored)
    assert metrics["agent_metrics"]["mean/reward"] == pytest.approx(fmean(scored.values()))
    groups = {group["_ng_task_index"]: group["mean/reward"] for group in metrics["group_level_metrics"]}
    assert groups == scored

    exported = folder / "sft.jsonl"
    run_command("export", folder, "--sft", exported, "--min-reward", "-1000", "--best", "100", "--truncated")
    found = sorted(line["reward"] for _, line in read_rows(exported))
    assert found == sorted(scored.values())


def test_a_line_without_a_task_index_has_the_number_of_the_line(original: Path, tmp_path: Path) -> None:
    lines = [line for _, line in read_rows(original / "rollouts.jsonl")]
    for line in lines[:6]:
        del line["_ng_task_index"]
        del line["_ng_rollout_index"]
    lines[6]["_ng_task_index"] = "six"
    lines[7]["_ng_task_index"] = True
    lines = lines[:8]
    folder = shutil.copytree(original, tmp_path / "bare")
    (folder / "rollouts.jsonl").write_bytes(b"\n".join(dump_row(line).strip() for line in lines) + b"\n\n")
    expected = [(number, 0) for number in range(8)]
    with read(folder) as run:
        assert [(row["task"], row["repeat"]) for row in run.list_rows()] == expected
        assert run["3:0"]["reward"] == lines[3]["reward"]
    assert [(stored.task, stored.repeat) for stored in StoredRun(folder).iter_rollouts()] == expected
    assert [stored.key for stored in RunFolder(folder).read_rollouts()] == expected
