"""The summaries of a run: metrics, failures, tokens and groups, computed from the lines on disk."""

from __future__ import annotations

import asyncio
import json
import math
import re
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from gymsdk import Environment, Rollout, Verdict, hookimpl, jsonl
from gymsdk.cli import progress
from gymsdk.cli.progress import format_metrics_table
from gymsdk.line import StoredRollout
from gymsdk.rollouts.folder import RunFolder
from gymsdk.rollouts.summary import StoredRollouts, build_summaries, iter_metrics_json
from gymsdk.servers.aggregates import aggregate_rows

OWN_METRICS = """
class OwnVerdict(Verdict):
    extracted_answer: str | None = None
    length: int = 0

@hookimpl
def verify():
    return OwnVerdict(reward=0.0)

@hookimpl
def metrics(rollouts):
    return {"own/rollouts": float(len(rollouts)), "own/length": sum(rollout.verdict.length for rollout in rollouts)}
"""


def _line(task: int, repeat: int, reward: float, answer: str | None = None, **fields: Any) -> dict[str, Any]:
    """Return the line of a scored rollout; *fields* replace fields of the line."""
    return {
        "responses_create_params": {"input": []},
        "difficulty": 5,
        "response": {"output": [], "usage": {"input_tokens": 10, "output_tokens": 2, "total_tokens": 12}},
        "reward": reward,
        "extracted_answer": answer,
        "length": 3,
        "_ng_task_index": task,
        "_ng_rollout_index": repeat,
        "gymsdk": {
            "id": f"{task}:{repeat}",
            "environment": "made",
            "seed": 1,
            "outcome": "scored",
            "ended": "done",
            "turns": 1,
            "usage": {"policy": {"input_tokens": 10, "output_tokens": 2, "total_tokens": 12, "calls": 1}},
            "timing": {"total": 30.0, "stages": {"model": 20.0, "verify": 10.0}, "model_calls": [20.0]},
            "verdict": ["extracted_answer", "length"],
        },
        **fields,
    }


def _failed_line(task: int, repeat: int, kind: str, message: str) -> dict[str, Any]:
    line = _line(task, repeat, 0.0, _ng_failure_class=kind, _ng_failure_message=message)
    del line["reward"]
    line["gymsdk"] |= {"outcome": "failed"}
    return line


@pytest.fixture
def environment_with_metrics(environment: Callable[..., Environment]) -> Environment:
    return environment(OWN_METRICS)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunFolder]:
    params = {"input": "What is 2 + 2?"}
    row = {"responses_create_params": params}
    keys = [{"_ng_task_index": task, "_ng_rollout_index": repeat} for task in range(2) for repeat in range(2)]
    inputs = [{**row, **key, "difficulty": key["_ng_task_index"]} for key in keys]
    with RunFolder(tmp_path / "out") as folder:
        folder.start(settings={}, about={}, inputs=inputs)
        yield folder


def _summary(folder: RunFolder, environment_with_metrics: Environment) -> dict[str, Any]:
    (summary,) = asyncio.run(build_summaries(folder, {"made": environment_with_metrics}))
    return {**summary.metrics, "group_level_metrics": list(summary.iter_tasks())}


def test_scored_rollouts_enter_means_and_failures_are_counted_with_their_tokens(
    folder: RunFolder, environment_with_metrics: Environment
) -> None:
    for line in (_line(0, 0, 1.0, "4"), _line(0, 1, 0.0, "5"), _line(1, 0, 1.0, "7")):
        folder.append(line)
    folder.append(_failed_line(1, 1, "tool_raised", "first"), failed=True)
    summary = _summary(folder, environment_with_metrics)
    metrics = summary["agent_metrics"]
    assert metrics["mean/reward"] == pytest.approx(2 / 3)
    # Fields of the verdict have means, fields of the row do not; the environment adds its own metrics.
    assert (metrics["mean/length"], "mean/difficulty" in metrics, metrics["own/rollouts"]) == (3.0, False, 3.0)
    assert (metrics["majority@1/accuracy"], summary["key_metrics"]["own/length"]) == (100.0, 9.0)
    assert summary["outcomes"] == {"scored": 3, "failed": 1}
    assert (summary["failures"], summary["failure_messages"]) == ({"tool_raised": 1}, {"tool_raised": "first"})
    assert summary["usage"] == {"policy": {"input_tokens": 40, "output_tokens": 8, "total_tokens": 48, "calls": 4}}
    assert summary["seconds"] == pytest.approx({"model": 0.02, "verify": 0.01})
    groups = {group["_ng_task_index"]: group for group in summary["group_level_metrics"]}
    assert {task: group["missing_num_rollouts"] for task, group in groups.items()} == {0: 0, 1: 1}
    assert {task: group["sample"] for task, group in groups.items()} == {0: {"difficulty": 0}, 1: {"difficulty": 1}}


def test_retryable_and_terminal_failures_are_counted_separately(
    folder: RunFolder, environment_with_metrics: Environment
) -> None:
    for task, (kind, gymsdk_fields, fields) in enumerate(
        [
            ("model_unreachable", {"retryable": True}, {}),
            ("model_unauthorized", {"retryable": False}, {}),
            ("tool_raised", {"retryable": False}, {"_ng_failure_terminal": True}),
        ]
    ):
        line = _failed_line(task, 0, kind, "no") | fields
        folder.append(line | {"gymsdk": line["gymsdk"] | gymsdk_fields}, failed=True)
    result = _summary(folder, environment_with_metrics)
    assert (result["failures_retryable"], result["failures_for_good"]) == (1, 1)
    assert result["failure_shares"] == {
        kind: count / sum(result["outcomes"].values()) for kind, count in result["failures"].items()
    }


def test_prompts_that_were_too_long_are_counted(
    folder: RunFolder, environment_with_metrics: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    details = {"reason": "max_output_tokens", "message": "maximum context length is 8"}
    folder.append(_line(0, 0, 0.0, response={"output": [], "incomplete_details": details}))
    folder.append(_line(0, 1, 0.0, response={"output": [], "incomplete_details": {"reason": "max_output_tokens"}}))
    result = _summary(folder, environment_with_metrics)
    assert result["prompts_too_long"] == 1
    assert re.search(r"^prompt too long +1$", format_metrics_table([result]), re.MULTILINE)
    monkeypatch.setattr(progress, "LIMIT_LABELS", {"prompts_too_long": "a row without a place"})
    assert re.search(r"^seconds .*\na row without a place +1\Z", format_metrics_table([result]), re.MULTILINE)


def test_a_vote_for_an_answer_is_in_the_metrics_and_in_the_table(
    folder: RunFolder, environment_with_metrics: Environment
) -> None:
    # Equal answers have different rewards, for example because the reward includes a penalty for length.
    for repeat, (reward, answer) in enumerate(
        [(1.0, "x"), (0.0, "x"), (0.5, "x"), (1.0, "y"), (1.0, "y"), (1.0, None)]
    ):
        folder.append(_line(0, repeat, reward, answer))
    result = _summary(folder, environment_with_metrics)
    assert result["agent_metrics"]["majority@6/accuracy"] == pytest.approx(100.0)
    assert result["agent_metrics"]["vote@6/accuracy"] == pytest.approx(100 * (1 + 0 + 0.5) / 3)
    rows = [line.split() for line in format_metrics_table([result]).splitlines()]
    assert ["vote@6", "50.0", "%"] in rows
    assert ["majority@6", "100.0", "%"] in rows
    assert "vote@1" not in {row[0] for row in rows}


def test_a_verdict_without_an_extracted_answer_has_no_majority_metrics(
    folder: RunFolder, environment_with_metrics: Environment
) -> None:
    folder.append(_failed_line(1, 0, "hook_raised", "no"), failed=True)
    summary = _summary(folder, environment_with_metrics)
    assert (summary["agent_metrics"], summary["group_level_metrics"]) == ({}, [])
    for repeat, (steps, verdict) in enumerate(((0.25, 0.75), (0.75, 0.0))):
        line = _line(0, repeat, steps + verdict, reward_components={"steps": steps, "verdict": verdict})
        line["gymsdk"]["verdict"] = []
        folder.append(line)
    metrics = _summary(folder, environment_with_metrics)["agent_metrics"]
    assert metrics["mean/reward_components/steps"] == 0.5
    assert not any(key.startswith(("majority", "vote")) for key in metrics)


class ConflictingMetrics:
    """An environment with a `metrics` hook that returns a metric that gymsdk computes itself, and a new metric."""

    @hookimpl
    def verify(self) -> Verdict:
        return Verdict(reward=0.0)

    @hookimpl
    def metrics(self) -> dict[str, float]:
        return {"mean/reward": 1.0, "own/value": 3.0}


def test_a_metrics_hook_cannot_replace_a_metric_of_gymsdk(folder: RunFolder) -> None:
    folder.append(_line(0, 0, 0.25))
    summary = _summary(folder, Environment("made", ConflictingMetrics()))
    for metrics in (summary["agent_metrics"], summary["key_metrics"]):
        assert (metrics["mean/reward"], metrics["own/value"]) == (0.25, 3.0)
    assert summary["complaint"].startswith("hook 'metrics' returned 'mean/reward', which gymsdk computes itself")


async def test_a_metrics_hook_cannot_replace_a_metric_of_the_servers() -> None:
    rows = [{"reward": 0.25, "_ng_task_index": 0}, {"reward": 0.25, "_ng_task_index": 1}]
    aggregated = await aggregate_rows(Environment("made", ConflictingMetrics()), {"verify_responses": rows})
    for metrics in (aggregated["agent_metrics"], aggregated["key_metrics"]):
        assert (metrics["mean/reward"], metrics["own/value"]) == (0.25, 3.0)
    assert "hook 'metrics' returned 'mean/reward'" in aggregated["complaint"]


def test_rewards_near_the_float_limit_have_finite_metrics(
    folder: RunFolder, environment_with_metrics: Environment
) -> None:
    for repeat, reward in enumerate((1.5e308, 1.5e308, -1.5e308)):
        folder.append(_line(0, repeat, reward))
    folder.append(_line(1, 0, 1.5e308))
    summary = _summary(folder, environment_with_metrics)
    metrics = summary["agent_metrics"]
    assert metrics["mean/reward"] == pytest.approx(0.75e308)
    assert metrics["std/reward"] == pytest.approx(1.5e308)
    assert metrics["stderr/reward"] > 0
    assert all(map(math.isfinite, metrics.values()))
    json.dumps(summary, allow_nan=False)


def test_stored_rollouts_are_a_sequence_read_from_disk() -> None:
    lines = [_line(task, 0, float(task), str(task)) for task in range(4)]
    reads = []

    def read() -> Iterator[StoredRollout]:
        reads.append(1)
        yield from map(StoredRollout, lines)

    stored: Sequence[Rollout] = StoredRollouts(read, "made", count=4)
    assert [rollout.reward for rollout in stored] == [0.0, 1.0, 2.0, 3.0]
    assert [rollout.id for rollout in stored[1:3]] == ["1:0", "2:0"]
    assert (stored[-1].id, len(stored)) == ("3:0", 4)
    assert len(reads) == 3
    with pytest.raises(IndexError):
        stored[4]
    assert list(StoredRollouts(read, "other", count=0)) == []


def test_the_metrics_file_is_written_task_by_task_and_holds_no_rollout_in_memory(
    folder: RunFolder, environment_with_metrics: Environment
) -> None:
    text, count = "x" * 50_000, 200
    for task in range(count):
        folder.append(_line(task % 2, task, 1.0, "4") | {"text": text})
    tracemalloc.start()
    try:
        summaries = asyncio.run(build_summaries(folder, {"made": environment_with_metrics}))
        asyncio.run(folder.write_metrics(iter_metrics_json(summaries)))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < count * len(text) / 4
    (summary,) = summaries
    whole = [{**summary.metrics, "group_level_metrics": list(summary.iter_tasks())}]
    assert folder.metrics.read_bytes() == jsonl.dump_document(whole)
