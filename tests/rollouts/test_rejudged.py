"""Stored rollouts judged once more, in this process and by servers."""

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
from rollouts.conftest import Ear, Theirs, echoed, lines_of

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
"""An environment whose verdict reads its state, whose replies pay, and that says something as it opens."""


@pytest.fixture(autouse=True)
def _installed(installed: Callable[..., Path]) -> None:
    installed("tally", TALLY)


@asynccontextmanager
async def _here(path: Path, **settings: Any) -> AsyncIterator[Judge]:
    run = reverify.StoredRun(path)
    async with open_local_judge(run, dict.fromkeys(run.list_environments(), settings)) as judge:
        yield judge


async def _again(path: Path, judge: Judge) -> list[Reverified]:
    return [each async for each in reverify_reverify(reverify.StoredRun(path).iter_cases(), judge, concurrency=3)]


async def _played(folder: Path, *, model: str = "scripted/oracle:0.5", **settings: Any) -> Path:
    plan = Plan(environments={"tally": settings}, model=model, limit=4, repeats=2)
    await execute(Run(plan, folder), Ear())
    return folder


@pytest.fixture
async def played(tmp_path: Path) -> Path:
    return await _played(tmp_path / "out")


async def test_a_state_is_rebuilt_and_every_line_comes_out_as_it_was(played: Path) -> None:
    async with _here(played) as judge:
        found = await _again(played, judge)
    assert {each.case.reward for each in found} == {0.25, 1.25}
    assert [each.changed for each in found] == [False] * 8
    assert [each.build_line() for each in found] == lines_of(played / "rollouts.jsonl")


async def test_servers_judge_as_is_judged_here(played: Path) -> None:
    async with process.serve(["tally"]) as running:
        servers = await fetch_servers(running.head_url)
        assert await list_sessionless(servers, reverify.StoredRun(played), force=False) == []
        found = await _again(played, build_remote_judge(servers))
    assert [each.build_line() for each in found] == lines_of(played / "rollouts.jsonl")


async def test_a_changed_grader_changes_rewards(played: Path) -> None:
    async with _here(played, bonus=0.5) as judge:
        found = await _again(played, judge)
    assert [each.changed for each in found] == [True] * 8
    for each in found:
        assert each.verdict is not None
        assert each.verdict.reward == (each.case.reward or 0) + 0.5
        assert each.verdict.components["steps"] == 0.25


async def test_the_settings_of_a_run_hold_unless_others_are_given(tmp_path: Path) -> None:
    folder = await _played(tmp_path / "out", bonus="0.5", key="hush")
    async with _here(folder) as judge:
        assert not any(each.changed for each in await _again(folder, judge))
    async with _here(folder, bonus=0.0) as judge:
        assert all(each.changed for each in await _again(folder, judge))


async def test_a_setting_that_is_gone_does_not_matter_and_a_wrong_one_is_told(played: Path) -> None:
    about = json.loads((played / "run.json").read_text())
    about["settings"]["environments"]["tally"]["settings"]["gone"] = 1
    (played / "run.json").write_text(json.dumps(about))
    async with _here(played) as judge:
        assert not any(each.changed for each in await _again(played, judge))
    with pytest.raises(BadConfig, match="no setting 'bonsu'"):
        async with _here(played, bonsu=1):
            pass


async def test_what_cannot_be_judged_is_kept_apart(played: Path) -> None:
    async with _here(played, judge="down") as judge:
        found = await _again(played, judge)
    assert {(each.kind, each.reason, each.changed, each.build_line()) for each in found} == {
        ("judge_failed", "the judge is down", False, None)
    }


async def test_failures_are_judged_once_the_judge_is_back(tmp_path: Path) -> None:
    folder = await _played(tmp_path / "out", judge="down")
    async with _here(folder / "failures.jsonl", judge="up") as judge:
        found = await _again(folder / "failures.jsonl", judge)
    assert [each.changed for each in found] == [True] * 8
    line = found[0].build_line()
    assert line is not None
    assert line["gymsdk"]["outcome"] == "scored"
    assert not any(key.startswith("_ng_failure_") for key in line)


async def test_lines_without_their_run_are_judged_from_what_they_say(played: Path, tmp_path: Path) -> None:
    lines = lines_of(played / "rollouts.jsonl")
    alone = tmp_path / "alone.jsonl"
    alone.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    async with _here(alone) as judge:
        assert [each.build_line() for each in await _again(alone, judge)] == lines


async def test_a_line_that_is_no_rollout_is_told_and_one_without_a_response_kept_apart(tmp_path: Path) -> None:
    path = tmp_path / "odd.jsonl"
    row: dict[str, Any] = {"responses_create_params": {"input": "?"}, "agent_ref": {"name": "tally_simple_agent"}}
    path.write_text(f"{json.dumps(row)}\n")
    async with _here(path) as judge:
        (found,) = await _again(path, judge)
    assert (found.kind, found.reason) == ("bad_row", "the line has no response to verify")
    path.write_text('{"reward": 1.0}\n')
    with pytest.raises(BadRow, match=r"odd.jsonl:1: the line is not a rollout"):
        reverify.StoredRun(path).list_environments()


async def test_a_server_that_needs_its_session_is_asked_by_force_only(tmp_path: Path) -> None:
    path = tmp_path / "theirs.jsonl"
    row = {"responses_create_params": {"input": "2 + 2"}, "answer": 4, "agent_ref": {"name": "sums_simple_agent"}}
    path.write_text(f"{json.dumps({**echoed(row, 1), **row, 'reward': 0.0, '_ng_task_index': 7})}\n")
    async with Theirs().serving() as theirs:
        servers = await fetch_servers(theirs.head)
        with pytest.raises(
            UsageError, match=r"'sums' does not declare that it verifies without a session, .* with --force"
        ):
            await list_sessionless(servers, reverify.StoredRun(path), force=False)
        assert await list_sessionless(servers, reverify.StoredRun(path), force=True) == ["sums"]
        theirs.mode = "stateless"
        assert await list_sessionless(servers, reverify.StoredRun(path), force=False) == []
        (found,) = await _again(path, build_remote_judge(servers))
    assert (found.case.task, found.case.reward, found.changed) == (7, 0.0, True)
    line = found.build_line()
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
async def test_a_verdict_a_server_does_not_give_is_none(tmp_path: Path, answer: Any, kind: str) -> None:
    path = tmp_path / "theirs.jsonl"
    row = {"responses_create_params": {"input": "2 + 2"}, "answer": 4, "agent_ref": {"name": "sums_simple_agent"}}
    path.write_text(f"{json.dumps({**row, **echoed(row, 1)})}\n")
    async with Theirs(verified=lambda _row, _number: answer).serving() as theirs:
        (found,) = await _again(path, build_remote_judge(await fetch_servers(theirs.head)))
    assert (found.kind, found.verdict) == (kind, None)
