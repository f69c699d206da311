"""Recordings: their jobs and expected rewards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import gymsdk
from gymsdk import Environment
from gymsdk.bench.recording import list_jobs, record_rollouts
from gymsdk.errors import BadRow, UnknownSplit, UsageError

ALIKE = """
@hookimpl
def tasks(split: Literal["train", "none"]):
    for answer in ("a", "b") if split == "train" else ():
        yield Task.ask("Which letter?", answer=answer)
        yield Task.ask(f"Which letter is {answer}?", answer=answer)

@hookimpl
def verify(task, transcript):
    return Verdict(reward=float(transcript.reply == task.row()["answer"]))

@hookimpl
def solve(task):
    return Message(content=task.row()["answer"])
"""


async def test_the_rewards_are_those_of_the_scripted_policy_and_can_be_replayed_or_selected(
    installed: Callable[..., Path], tmp_path: Path
) -> None:
    installed()
    sums, model, file = gymsdk.load("sums"), gymsdk.model("scripted/oracle:0.5"), tmp_path / "recording.jsonl"
    half = await record_rollouts(sums, model, split="train", limit=40)
    assert len(half.jobs) == len(half.rewards or ()) == 40
    assert set(half.rewards or ()) == {0.0, 1.0}
    half.write(file)
    again = await record_rollouts(sums, gymsdk.model(f"scripted/replay:{file}"), split="train", limit=40)
    assert again.rewards == half.rewards
    right = await record_rollouts(sums, model, split="train", limit=20, keep=lambda rollout: rollout.reward == 1.0)
    assert 0 < len(right.jobs) < 20
    assert set(right.rewards or ()) == {1.0}


async def test_the_first_of_tasks_with_equal_openings_is_recorded(environment: Callable[..., Environment]) -> None:
    found = await record_rollouts(environment(ALIKE), gymsdk.model("scripted/oracle"), split="train", limit=9)
    assert [job.row["answer"] for job in found.jobs] == ["a", "a", "b"]
    assert found.rewards == (1.0, 1.0, 1.0)


async def test_an_empty_recording_and_a_task_without_a_reward_are_rejected(installed: Callable[..., Path]) -> None:
    installed()
    sums, null = gymsdk.load("sums"), gymsdk.model("scripted/null")
    with pytest.raises(UsageError, match="no task of 'sums' can be replayed deterministically"):
        await record_rollouts(sums, null, split=None, limit=2, keep=lambda rollout: rollout.turns == 9)
    broken = gymsdk.load("sums", breaks=[next(iter(sums.tasks("train"))).row()["answer"]])
    with pytest.raises(UsageError, match=r"task 0 of 'sums' cannot be recorded \(hook_raised: .*choose another split"):
        await record_rollouts(broken, gymsdk.model("scripted/oracle"), split="train", limit=2)


def test_an_empty_split_is_rejected(environment: Callable[..., Environment]) -> None:
    with pytest.raises(BadRow, match="split 'none' of 'made' has no rows"):
        list_jobs(environment(ALIKE), split="none", limit=3)
    with pytest.raises(UnknownSplit):
        list_jobs(environment(ALIKE), split="tran", limit=3)
