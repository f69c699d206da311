"""Runs played by servers: ours, which give what is played in this process, and NeMo Gym's."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from gymsdk import ServerClient
from gymsdk.client import UnknownServer
from gymsdk.deploy import process
from gymsdk.episode import Budget
from gymsdk.errors import BadOutput, BadRow, Failed, ModelLost, UsageError
from gymsdk.http.client import Retry
from gymsdk.rollouts.jobs import Job
from gymsdk.rollouts.plan import Plan
from gymsdk.rollouts.remote import RemotePlayer
from gymsdk.rollouts.run import Run, RunLimits, execute
from gymsdk.types import Row
from rollouts.conftest import Ear, Theirs, echoed, lines_of, listening, told_by

Tasks = Callable[..., Path]

ALL: dict[str, dict[str, Any]] = {"math": {}, "tool_call": {}, "multineedle": {"distractors": 10}}


@pytest.fixture(autouse=True)
def _sums(installed: Callable[..., Path]) -> None:
    installed()


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


async def _run(out: Path, *, resume: bool = False, attempts: int = 1, breaker: float = 300.0, **plan: Any) -> list[Row]:
    given = {"environments": {}, **plan}
    pace = RunLimits(attempts=attempts, timeout=breaker)
    return await execute(Run(Plan(**given), out, resume=resume, limits=pace), Ear())


def _is_missing(out: Path) -> bool:
    return not out.exists()


@pytest.mark.parametrize("model", ["scripted/oracle:0.5", "scripted/random"])
async def test_what_servers_play_is_what_is_played_here(tmp_path: Path, model: str) -> None:
    plan = {"limit": 4, "repeats": 2, "seed": 3, "sampling": {"temperature": 0.5}}
    figures = [await _run(tmp_path / "here", environments=ALL, model=model, **plan)]
    async with process.serve(ALL, settings=ALL, model=model) as running:
        figures.append(await _run(tmp_path / "there", environments=ALL, head=running.head_url, **plan))
        rows = {"tasks": tmp_path / "here" / "inputs.jsonl", "seed": 3}
        figures.append(await _run(tmp_path / "rows", head=running.head_url, **rows))
    here, there, rows_only = (told_by(tmp_path / name / "rollouts.jsonl") for name in ("here", "there", "rows"))
    assert len(here) == 24
    assert here == there == rows_only
    for each in figures:
        for entry in each:
            del entry["seconds"]
    assert figures[0] == figures[1] == figures[2]


async def test_failures_of_our_servers_keep_their_stage_and_kind(out: Path, tmp_path: Path, tasks: Tasks) -> None:
    settings = {"sums": {"breaks": [4]}}
    async with process.serve(["sums"], settings=settings, model="scripted/null") as running:
        await _run(out, head=running.head_url, tasks=tasks())
    await _run(tmp_path / "here", environments=settings, model="scripted/null", tasks=tasks())
    there, here = (lines_of(folder / "failures.jsonl")[0] for folder in (out, tmp_path / "here"))
    failures = [{key: line[key] for key in line if key.startswith("_ng_")} for line in (there, here)]
    assert failures[0] == failures[1]
    assert (there["_ng_failure_class"], there["_ng_failure_stage"]) == ("hook_raised", "verify")
    assert there["gymsdk"]["outcome"] == here["gymsdk"]["outcome"]


async def test_a_row_that_does_not_fit_their_environment_is_a_failure_that_stays(out: Path, tasks: Tasks) -> None:
    row = {"responses_create_params": {"input": "?"}, "agent_ref": {"name": "sums_simple_agent"}}
    async with process.serve(["sums"]) as running:
        await _run(out, head=running.head_url, tasks=tasks(row))
    (line,) = lines_of(out / "failures.jsonl")
    assert (line["_ng_failure_class"], line["_ng_failure_terminal"]) == ("bad_row", True)
    assert "answer: Field required" in line["_ng_failure_message"]


async def test_nemo_gyms_answer_is_a_rollout_too(out: Path, tasks: Tasks) -> None:
    async with Theirs().serving() as theirs:
        (figures,) = await _run(out, head=theirs.head, tasks=tasks(), repeats=2)
    first, second = sorted(lines_of(out / "rollouts.jsonl"), key=lambda line: line["_ng_rollout_index"])
    assert (first["reward"], first["extracted_answer"], first["gymsdk"]["verdict"]) == (
        1.0,
        "4",
        ["grader_timeout", "extracted_answer"],
    )
    assert first["gymsdk"]["usage"]["policy"]["output_tokens"] == 3
    assert (first["gymsdk"]["turns"], first["gymsdk"]["ended"], second["_ng_rollout_index"]) == (1, "done", 1)
    assert figures["agent_metrics"]["mean/reward"] == 1.0


async def test_each_try_of_each_rollout_has_an_id_of_its_own(out: Path, tasks: Tasks) -> None:
    def busy(row: dict[str, Any], number: int) -> Any:
        return JSONResponse({"detail": "busy"}, 503) if number == 1 else echoed(row, number)

    async with Theirs(busy).serving() as theirs:
        await _run(out, head=theirs.head, tasks=tasks(), attempts=3)
        await _run(out.with_name("again"), head=theirs.head, tasks=tasks(), attempts=3)
    ids = [row["_ng_rollout_id"] for row in theirs.sent]
    assert len(set(ids)) == len(ids) == 3
    assert all(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", each) for each in ids)
    first = theirs.sent[0]
    assert (first["_ng_task_index"], first["_ng_rollout_index"]) == (0, 0)
    assert first["gymsdk"] == {
        "seed": first["gymsdk"]["seed"],
        "repeat": 0,
        "budget": {"turns": 32, "tools": 128, "seconds": 600.0},
    }


async def test_a_busy_server_is_waited_for_as_long_as_it_asks(out: Path, tasks: Tasks) -> None:
    def busy(row: dict[str, Any], number: int) -> Any:
        headers = {"Retry-After": "1"}
        return JSONResponse({"detail": "busy"}, 429, headers) if number == 1 else echoed(row, number)

    begun = asyncio.get_running_loop().time()
    async with Theirs(busy).serving() as theirs:
        await _run(out, head=theirs.head, tasks=tasks(), attempts=2)
    assert asyncio.get_running_loop().time() - begun >= 1.0
    assert lines_of(out / "rollouts.jsonl")[0]["gymsdk"]["attempts"] == 2


@pytest.mark.parametrize(
    ("status", "body", "told"),
    [
        (422, {"detail": "no such field"}, ("bad_row", "reset", True)),
        (422, {"detail": "x", "stage": "step", "kind": "tool_raised"}, ("tool_raised", "step", True)),
        (503, {"detail": "x", "stage": "model", "kind": "model_timeout"}, ("model_timeout", "model", False)),
        (500, "KeyError('x')", ("server_error", "host", False)),
        (404, {"detail": "Not Found"}, ("server_error", "host", True)),
        (200, {"reward": 1.0}, ("bad_answer", "verify", True)),
        (200, ["no", "row"], ("bad_answer", "host", True)),
    ],
)
async def test_a_refusal_is_a_failure_by_its_status(
    out: Path, tasks: Tasks, status: int, body: object, told: tuple[str, str, bool]
) -> None:
    async with Theirs(lambda _row, _number: JSONResponse(body, status)).serving() as theirs:
        await _run(out, head=theirs.head, tasks=tasks())
    (line,) = lines_of(out / "failures.jsonl")
    assert (line["_ng_failure_class"], line["_ng_failure_stage"], line["_ng_failure_terminal"]) == told
    assert "reward" not in line


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"_ng_failure_class": "judge_failed", "_ng_failure_judge_error": "judge down"}, "judge_failed"),
        ({"mask_sample": True, "failure_kind": "judge_failed", "failure_reason": "judge down"}, "judge_failed"),
        ({"verification_skipped": True}, "verification_skipped"),
        ({"reward": None}, "bad_answer"),
        ({"reward": "1.0"}, "bad_answer"),
    ],
)
async def test_a_reward_that_does_not_count_is_never_scored(
    out: Path, tasks: Tasks, fields: dict[str, Any], kind: str
) -> None:
    async with Theirs(lambda row, number: {**echoed(row, number), **fields}).serving() as theirs:
        (figures,) = await _run(out, head=theirs.head, tasks=tasks(), attempts=3)
    (line,) = lines_of(out / "failures.jsonl")
    assert (line["_ng_failure_class"], len(theirs.sent)) == (kind, 1)
    assert (out / "rollouts.jsonl").read_bytes() == b""
    assert "mean/reward" not in figures["agent_metrics"]


class Cut(Theirs):
    """Ends the connection in the middle of its first answer."""

    def app(self) -> Any:
        whole = super().app()
        lost: list[str] = []

        async def cutting(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] != "http" or scope["path"] != "/run" or lost:
                await whole(scope, receive, send)
                return
            message = await receive()
            lost.append("answer")
            self.sent.append(json.loads(message["body"]))
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"9")]})
            # The connection ends in the middle of the body.
            await send({"type": "http.response.body", "body": b"{", "more_body": True})

        return cutting


async def test_a_lost_answer_is_asked_for_again_where_a_row_is_played_once_under_its_id(
    out: Path, tasks: Tasks
) -> None:
    async with Cut(about={"gymsdk_version": "0.1.0"}).serving() as ours:
        await _run(out, head=ours.head, tasks=tasks())
    ids = [row["_ng_rollout_id"] for row in ours.sent]
    assert len(ids) == 2
    assert ids[0] == ids[1]
    assert lines_of(out / "rollouts.jsonl")[0]["gymsdk"]["attempts"] == 1


async def test_a_lost_answer_of_others_is_not_asked_for_again_under_its_id(out: Path, tasks: Tasks) -> None:
    async with Cut().serving() as theirs:
        await _run(out, head=theirs.head, tasks=tasks())
    assert len(theirs.sent) == 1
    assert lines_of(out / "failures.jsonl")[0]["_ng_failure_class"] == "server_unreachable"


async def test_an_agent_that_has_moved_is_looked_up_again() -> None:
    job = Job("sums", 0, 0, {"responses_create_params": {"input": "?"}, "agent_ref": {"name": "sums_simple_agent"}})
    async with Theirs().serving() as theirs:
        client = ServerClient(theirs.head)
        delivery = RemotePlayer(client, attempts=1, retry=Retry(times=0, first=0.01))
        home, theirs.head = theirs.head, "http://127.0.0.1:9"
        assert await client.url("sums_simple_agent") == theirs.head
        theirs.head = home
        played = await delivery(job)
    assert (played.rollout.outcome, played.attempts, len(theirs.sent)) == ("scored", 1, 1)


async def test_an_agent_that_the_head_has_lost_is_a_failure_of_its_rollout() -> None:
    async with Theirs().serving() as theirs:
        delivery = RemotePlayer(ServerClient(theirs.head), attempts=1, agent_wait=0)
        played = await delivery(Job("sums", 0, 0, {"agent_ref": {"name": "strange"}}))
    assert played.rollout.failure is not None
    assert (played.rollout.failure.kind, played.rollout.failure.retryable) == ("server_unreachable", True)


async def test_a_row_that_is_sent_back_whole_is_not_taken_for_an_answer_of_ours(out: Path, tasks: Tasks) -> None:
    async with Theirs(lambda row, number: {**row, **echoed(row, number)}).serving() as theirs:
        await _run(out, head=theirs.head, tasks=tasks())
    (line,) = lines_of(out / "rollouts.jsonl")
    assert (line["reward"], line["gymsdk"]["verdict"]) == (1.0, ["grader_timeout", "extracted_answer"])


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"policy_model_name": "vllm/other"}, "the model of the servers was vllm/one, now vllm/other"),
        ({"gymsdk_version": "0.2"}, "the servers' version of gymsdk was not given, now 0.2"),
    ],
)
async def test_a_resume_does_not_mix_what_other_servers_play(
    out: Path, tasks: Tasks, changed: dict[str, Any], told: str
) -> None:
    about = {"policy_model_name": "vllm/one"}
    async with Theirs(about=about).serving() as theirs:
        await _run(out, head=theirs.head, tasks=tasks())
        theirs.about = about | changed
        with pytest.raises(BadOutput, match=told):
            await _run(out, head=theirs.head, tasks=tasks(), resume=True)


async def test_an_answer_that_never_comes_has_a_deadline(out: Path, tasks: Tasks) -> None:
    class Slow(Theirs):
        async def run(self, request: Request) -> Response:
            await asyncio.Event().wait()
            raise AssertionError

    async with Slow().serving() as theirs:
        plan = {"head": theirs.head, "tasks": tasks(), "budget": Budget(seconds=0.1)}
        await _run(out, breaker=0.2, **plan)
    (line,) = lines_of(out / "failures.jsonl")
    assert (line["_ng_failure_class"], line["_ng_failure_terminal"]) == ("server_timeout", False)


async def test_a_run_gives_up_on_servers_that_are_gone(out: Path, tasks: Tasks) -> None:
    async with Theirs(lambda _row, _number: JSONResponse("broken", 500)).serving() as theirs:
        with pytest.raises(ModelLost, match=r"64 rollouts failed for the same reason .* use --resume"):
            await _run(out, head=theirs.head, tasks=tasks(count=200))
        theirs.answered = echoed
        (figures,) = await _run(out, head=theirs.head, tasks=tasks(count=200), resume=True)
    assert figures["outcomes"] == {"scored": 200}


async def test_a_run_goes_on_with_servers_that_have_moved(out: Path, tasks: Tasks) -> None:
    def half(row: dict[str, Any], number: int) -> Any:
        return echoed(row, number) if row["_ng_task_index"] < 2 else JSONResponse("broken", 500)

    async with Theirs(half).serving() as theirs:
        await _run(out, head=theirs.head, tasks=tasks(count=4))
    async with Theirs().serving() as theirs:
        await _run(out, head=theirs.head, tasks=tasks(count=4), resume=True)
    assert sorted(told_by(out / "rollouts.jsonl")) == [(number, 0) for number in range(4)]
    assert len(theirs.sent) == 2


async def test_an_agent_with_a_name_of_its_own_is_asked_by_that(out: Path, tasks: Tasks) -> None:
    row = {"responses_create_params": {"input": "2 + 2"}, "answer": 4, "agent_ref": {"name": "my_own"}}
    async with Theirs(agent="my_own").serving() as theirs:
        (figures,) = await _run(out, head=theirs.head, tasks=tasks(row))
    assert figures["agent_ref"] == {"name": "my_own"}
    assert lines_of(out / "rollouts.jsonl")[0]["agent_ref"]["name"] == "my_own"


async def test_a_row_for_an_agent_the_head_does_not_know_is_told_before_anything_is_written(
    out: Path, tasks: Tasks
) -> None:
    row = {"responses_create_params": {"input": "?"}, "agent_ref": {"name": "sumz_simple_agent"}}
    async with Theirs().serving() as theirs:
        with pytest.raises(UnknownServer, match=r"tasks.jsonl:1: .* knows no agent 'sumz_simple_agent'; did you mean"):
            await _run(out, head=theirs.head, tasks=tasks(row))
        with pytest.raises(UnknownServer, match="knows no agent 'math_simple_agent'"):
            await _run(out, head=theirs.head, environments={"math": {}}, limit=1)
    assert _is_missing(out)


async def test_a_row_without_an_agent_is_for_the_one_environment_named(out: Path, tasks: Tasks) -> None:
    row = {"responses_create_params": {"input": "?"}, "answer": 4}
    async with Theirs().serving() as theirs:
        with pytest.raises(BadRow, match=r"does not name its agent; add `agent_ref.name`"):
            await _run(out, head=theirs.head, tasks=tasks(row))
        await _run(out, head=theirs.head, tasks=tasks(row), environments={"sums": {}})
    assert theirs.sent[0]["agent_ref"]["name"] == "sums_simple_agent"


async def test_a_head_that_has_just_begun_is_waited_for(out: Path, tasks: Tasks) -> None:
    theirs, looks = Theirs(), 0

    def config() -> str:
        nonlocal looks
        looks += 1
        # Two looks long it has heard of nobody.
        return "{}" if looks < 3 else theirs.config()

    app = FastAPI()
    app.add_api_route("/global_config_dict_yaml", config, methods=["GET"])
    app.add_api_route("/nodes", lambda: {"settled": False}, methods=["GET"])
    app.add_api_route("/run", theirs.run, methods=["POST"])
    async with listening(app) as (host, port):
        theirs.head = f"http://{host}:{port}"
        await _run(out, head=theirs.head, tasks=tasks(count=2))
    assert (looks >= 3, len(lines_of(out / "rollouts.jsonl"))) == (True, 2)


async def test_what_is_no_head_is_told(out: Path, tasks: Tasks) -> None:
    with pytest.raises(UsageError, match=r"write it as a URL, as in http://127.0.0.1:11000"):
        await _run(out, head="localhost:11000", tasks=tasks())
    async with Theirs().serving() as theirs:
        with pytest.raises(Failed, match="check that it is a head server"):
            await _run(out, head=f"{theirs.head}/elsewhere", tasks=tasks())
    assert _is_missing(out)
