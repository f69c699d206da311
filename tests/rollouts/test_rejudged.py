"""Stored rollouts are verified again, in this process and by servers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from fastapi.responses import JSONResponse

from gymsdk.deploy import process
from gymsdk.errors import BadConfig, BadRow, UsageError
from gymsdk.rollouts import reverify
from gymsdk.rollouts.plan import Plan
from gymsdk.rollouts.remote import fetch_servers
from gymsdk.rollouts.reverify import Judge, Reverified, build_remote_judge, list_sessionless, open_local_judge
from gymsdk.rollouts.reverify import reverify as reverify_reverify
from gymsdk.rollouts.run import Run, execute
from rollouts.conftest import NemoGymServers, RecordingProgress, read_lines, reply_four

TALLY = """
from pydantic import SecretStr
from gymsdk import Config, Message, Reset, State, Step, Task, ToolCall, Unscorable, Verdict, hookimpl
from typing import Literal

class Goal(Task):
    goal: int = 3

class Settings(Config):
    bonus: float = 0.0
    judge: str = "up"
    key: SecretStr = SecretStr("none")

class Count(State):
    count: int = 0

class Counted(Verdict):
    goal: int = 0
    final: int = 0

async def add(number: int, state: State) -> int:
    "Add to the tally."
    state.count += number
    return state.count

@hookimpl
def tools():
    return [add]

@hookimpl
def tasks(split: Literal["train"], seed):
    yield from (Goal.ask(f"reach {number}", goal=number) for number in range(3, 7))

@hookimpl
async def reset(task: Goal):
    return Reset(state=Count(count=1), messages=["begin"])

@hookimpl
async def step(action, state: Count):
    return None if isinstance(action, ToolCall) else Step(reward=0.25, done=True)

@hookimpl
async def verify(task: Goal, state: Count, transcript, config: Settings):
    if config.judge != "up":
        raise Unscorable("the judge is down", kind="judge_failed", retryable=True)
    assert [item["content"] for item in transcript.opening] == [f"reach {task.goal}", "begin"]
    right = float(state.count == task.goal)
    return Counted(reward=right + config.bonus, goal=task.goal, final=state.count)

@hookimpl
async def solve(task: Goal, state: Count):
    if state.count < task.goal:
        return [ToolCall(call_id="", name="add", arguments='{"number": 1}')]
    return Message(content="done")
"""
"""Source of an environment with a verdict that depends on its state, step rewards, and an opening message."""


@pytest.fixture(autouse=True)
def _installed(installed: Callable[..., Path]) -> None:
    installed("tally", TALLY)


@asynccontextmanager
async def _open_judge(path: Path, **settings: Any) -> AsyncIterator[Judge]:
    run = reverify.StoredRun(path)
    async with open_local_judge(run, dict.fromkeys(run.list_environments(), settings)) as judge:
        yield judge


async def _reverify(path: Path, judge: Judge) -> list[Reverified]:
    return [
        result async for result in reverify_reverify(reverify.StoredRun(path).iter_rollouts(), judge, concurrency=3)
    ]


async def _play(folder: Path, *, model: str = "scripted/oracle:0.5", **settings: Any) -> Path:
    plan = Plan(environments={"tally": settings}, model=model, limit=4, repeats=2)
    await execute(Run(plan, folder), RecordingProgress())
    return folder


@pytest.fixture
async def played(tmp_path: Path) -> Path:
    return await _play(tmp_path / "out")


async def test_the_state_is_rebuilt_and_every_line_is_unchanged(played: Path, tmp_path: Path) -> None:
    (tmp_path / "alone.jsonl").write_bytes((played / "rollouts.jsonl").read_bytes())
    for path in (played, tmp_path / "alone.jsonl"):
        async with _open_judge(path) as judge:
            results = await _reverify(path, judge)
        assert {result.stored.reward for result in results} == {0.25, 1.25}
        assert [result.changed for result in results] == [False] * 8
        assert [result.build_line() for result in results] == read_lines(played / "rollouts.jsonl")


@pytest.mark.slow
async def test_servers_give_the_same_verdicts_as_this_process(played: Path) -> None:
    async with process.serve(["tally"]) as running:
        servers = await fetch_servers(running.head_url)
        assert await list_sessionless(servers, reverify.StoredRun(played), force=False) == []
        results = await _reverify(played, build_remote_judge(servers))
    assert [result.build_line() for result in results] == read_lines(played / "rollouts.jsonl")


async def test_a_changed_verifier_changes_rewards(played: Path) -> None:
    async with _open_judge(played, bonus=0.5) as judge:
        results = await _reverify(played, judge)
    assert [result.changed for result in results] == [True] * 8
    for result in results:
        assert result.verdict is not None
        assert result.verdict.reward == (result.stored.reward or 0) + 0.5
        assert result.verdict.components["steps"] == 0.25
    async with _open_judge(played, judge="down") as judge:
        results = await _reverify(played, judge)
    assert {(result.kind, result.reason, result.changed, result.build_line()) for result in results} == {
        ("judge_failed", "the judge is down", False, None)
    }


async def test_the_settings_of_the_run_apply_unless_overridden(tmp_path: Path) -> None:
    folder = await _play(tmp_path / "out", bonus="0.5", key="hush")
    async with _open_judge(folder) as judge:
        assert not any(result.changed for result in await _reverify(folder, judge))
    async with _open_judge(folder, bonus=0.0) as judge:
        assert all(result.changed for result in await _reverify(folder, judge))


@pytest.mark.slow
async def test_a_removed_setting_is_ignored_and_an_unknown_one_is_rejected(played: Path) -> None:
    about = json.loads((played / "run.json").read_text())
    about["settings"]["environments"]["tally"]["settings"]["gone"] = 1
    (played / "run.json").write_text(json.dumps(about))
    async with _open_judge(played) as judge:
        assert not any(result.changed for result in await _reverify(played, judge))
    with pytest.raises(BadConfig, match="no setting 'bonsu'"):
        async with _open_judge(played, bonsu=1):
            pass


@pytest.mark.slow
async def test_failed_rollouts_are_scored_once_the_judge_works(tmp_path: Path) -> None:
    folder = await _play(tmp_path / "out", judge="down")
    async with _open_judge(folder / "failures.jsonl", judge="up") as judge:
        results = await _reverify(folder / "failures.jsonl", judge)
    assert [result.changed for result in results] == [True] * 8
    line = results[0].build_line()
    assert line is not None
    assert line["gymsdk"]["outcome"] == "scored"
    assert not any(key.startswith("_ng_failure_") for key in line)


async def test_a_line_that_is_not_a_rollout_is_rejected_and_a_missing_response_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "odd.jsonl"
    row: dict[str, Any] = {"responses_create_params": {"input": "?"}, "agent_ref": {"name": "tally_simple_agent"}}
    path.write_text(f"{json.dumps(row)}\n")
    async with _open_judge(path) as judge:
        (result,) = await _reverify(path, judge)
    assert (result.kind, result.reason) == ("bad_row", "the line has no response to verify")
    path.write_text('{"reward": 1.0}\n')
    with pytest.raises(BadRow, match=r"odd.jsonl:1: the line is not a rollout"):
        reverify.StoredRun(path).list_environments()


async def test_a_server_that_needs_its_session_requires_force(tmp_path: Path) -> None:
    path = tmp_path / "theirs.jsonl"
    row = {"responses_create_params": {"input": "2 + 2"}, "answer": 4, "agent_ref": {"name": "sums_simple_agent"}}
    path.write_text(f"{json.dumps({**reply_four(row, 1), **row, 'reward': 0.0, '_ng_task_index': 7})}\n")
    async with NemoGymServers().serve() as nemo_gym:
        servers = await fetch_servers(nemo_gym.head)
        with pytest.raises(
            UsageError, match=r"'sums' does not declare that it verifies without a session, .* with --force"
        ):
            await list_sessionless(servers, reverify.StoredRun(path), force=False)
        assert await list_sessionless(servers, reverify.StoredRun(path), force=True) == ["sums"]
        nemo_gym.mode = "stateless"
        assert await list_sessionless(servers, reverify.StoredRun(path), force=False) == []
        (result,) = await _reverify(path, build_remote_judge(servers))
    assert (result.stored.task, result.stored.reward, result.changed) == (7, 0.0, True)
    line = result.build_line()
    assert line is not None
    assert (line["reward"], line["extracted_answer"], line["_ng_task_index"]) == (1.0, "4", 7)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        ({"mask_sample": True, "reward": 0.0, "failure_kind": "judge_failed"}, "judge_failed"),
        (JSONResponse({"detail": "x", "stage": "verify", "kind": "worker_lost"}, 422), "worker_lost"),
        (JSONResponse({"detail": "no"}, 422), "bad_row"),
        ({"no": "reward"}, "bad_answer"),
    ],
)
async def test_an_error_of_the_server_is_no_verdict(tmp_path: Path, answer: Any, kind: str) -> None:
    path = tmp_path / "theirs.jsonl"
    row = {"responses_create_params": {"input": "2 + 2"}, "answer": 4, "agent_ref": {"name": "sums_simple_agent"}}
    path.write_text(f"{json.dumps({**row, **reply_four(row, 1)})}\n")
    async with NemoGymServers(verify_reply=lambda _row, _number: answer).serve() as nemo_gym:
        (result,) = await _reverify(path, build_remote_judge(await fetch_servers(nemo_gym.head)))
    assert (result.kind, result.verdict) == (kind, None)
