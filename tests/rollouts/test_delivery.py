"""Runs played by servers: gymsdk's servers, which give the same results as this process, and NeMo Gym's."""

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
from gymsdk.config.model import Deployment
from gymsdk.deploy import process
from gymsdk.errors import BadOutput, BadRow, Failed, ModelLost, UsageError
from gymsdk.http.client import Retry
from gymsdk.rollouts.agent_client import AgentClient
from gymsdk.rollouts.jobs import Job
from gymsdk.rollouts.plan import Plan
from gymsdk.rollouts.remote import RemotePlayer
from gymsdk.rollouts.run import Run, execute
from gymsdk.rollouts.settings import RunLimits
from gymsdk.types import Budget, Row
from rollouts.conftest import NemoGymServers, RecordingProgress, read_comparable, read_lines, reply_four, serve_app

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
    return await execute(Run(Plan(**given), out, resume=resume, limits=pace), RecordingProgress())


def _is_missing(out: Path) -> bool:
    return not out.exists()


@pytest.mark.parametrize("model", ["scripted/oracle:0.5", "scripted/random"])
async def test_servers_give_the_same_rollouts_as_this_process(tmp_path: Path, model: str) -> None:
    plan = {"limit": 4, "repeats": 2, "seed": 3, "sampling": {"temperature": 0.5}}
    figures = [await _run(tmp_path / "here", environments=ALL, model=model, **plan)]
    async with process.serve(deployment=Deployment(environments=ALL), model=model) as running:
        figures.append(await _run(tmp_path / "there", environments=ALL, head=running.head_url, **plan))
        rows = {"tasks": tmp_path / "here" / "inputs.jsonl", "seed": 3}
        figures.append(await _run(tmp_path / "rows", head=running.head_url, **rows))
    here, there, rows_only = (read_comparable(tmp_path / name / "rollouts.jsonl") for name in ("here", "there", "rows"))
    assert len(here) == 24
    assert here == there == rows_only
    for summaries in figures:
        for entry in summaries:
            del entry["seconds"]
    assert figures[0] == figures[1] == figures[2]


@pytest.mark.slow
async def test_failures_of_gymsdk_servers_keep_their_stage_and_kind(out: Path, tmp_path: Path, tasks: Tasks) -> None:
    settings = {"sums": {"breaks": [4]}}
    async with process.serve(deployment=Deployment(environments=settings), model="scripted/null") as running:
        await _run(out, head=running.head_url, tasks=tasks())
    await _run(tmp_path / "here", environments=settings, model="scripted/null", tasks=tasks())
    there, here = (read_lines(folder / "failures.jsonl")[0] for folder in (out, tmp_path / "here"))
    failures = [{key: line[key] for key in line if key.startswith("_ng_")} for line in (there, here)]
    assert failures[0] == failures[1]
    assert (there["_ng_failure_class"], there["_ng_failure_stage"]) == ("hook_raised", "verify")
    assert there["gymsdk"]["outcome"] == here["gymsdk"]["outcome"]


async def test_a_row_that_does_not_fit_the_servers_environment_is_a_terminal_failure(out: Path, tasks: Tasks) -> None:
    row = {"responses_create_params": {"input": "?"}, "agent_ref": {"name": "sums_simple_agent"}}
    async with process.serve(["sums"]) as running:
        await _run(out, head=running.head_url, tasks=tasks(row))
    (line,) = read_lines(out / "failures.jsonl")
    assert (line["_ng_failure_class"], line["_ng_failure_terminal"]) == ("bad_row", True)
    assert "answer: Field required" in line["_ng_failure_message"]


@pytest.mark.parametrize("echoes", [False, True])
async def test_a_reply_of_nemo_gym_is_a_rollout_even_if_it_echoes_the_row(
    out: Path, tasks: Tasks, *, echoes: bool
) -> None:
    def reply(row: dict[str, Any], number: int) -> dict[str, Any]:
        return {**(row if echoes else {}), **reply_four(row, number)}

    async with NemoGymServers(reply).serve() as servers:
        (figures,) = await _run(out, head=servers.head, tasks=tasks(), repeats=2)
    first, second = sorted(read_lines(out / "rollouts.jsonl"), key=lambda line: line["_ng_rollout_index"])
    assert (first["reward"], first["extracted_answer"]) == (1.0, "4")
    assert first["gymsdk"]["verdict"] == ["grader_timeout", "extracted_answer"]
    assert first["gymsdk"]["usage"]["policy"]["output_tokens"] == 3
    assert (first["gymsdk"]["turns"], first["gymsdk"]["ended"], second["_ng_rollout_index"]) == (1, "done", 1)
    assert figures["agent_metrics"]["mean/reward"] == 1.0


@pytest.mark.slow
async def test_a_busy_server_is_retried_after_the_time_it_asks_for_with_another_id(out: Path, tasks: Tasks) -> None:
    def reply_busy_once(row: dict[str, Any], number: int) -> Any:
        headers = {"Retry-After": "1"}
        return JSONResponse({"detail": "busy"}, 429, headers) if number == 1 else reply_four(row, number)

    started = asyncio.get_running_loop().time()
    async with NemoGymServers(reply_busy_once).serve() as servers:
        await _run(out, head=servers.head, tasks=tasks(), attempts=3)
        assert asyncio.get_running_loop().time() - started >= 1.0
        assert read_lines(out / "rollouts.jsonl")[0]["gymsdk"]["attempts"] == 2
        await _run(out.with_name("again"), head=servers.head, tasks=tasks(), attempts=3)
    ids = [row["_ng_rollout_id"] for row in servers.sent]
    assert len(set(ids)) == len(ids) == 3
    assert all(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name) for name in ids)
    first = servers.sent[0]
    assert (first["_ng_task_index"], first["_ng_rollout_index"]) == (0, 0)
    assert first["gymsdk"] == {
        "seed": first["gymsdk"]["seed"],
        "repeat": 0,
        "budget": {"turns": 32, "tools": 128, "seconds": 600.0},
    }


@pytest.mark.parametrize(
    ("status", "body", "expected"),
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
async def test_an_error_response_is_a_failure_classified_by_its_status(
    out: Path, tasks: Tasks, status: int, body: object, expected: tuple[str, str, bool]
) -> None:
    async with NemoGymServers(lambda _row, _number: JSONResponse(body, status)).serve() as servers:
        await _run(out, head=servers.head, tasks=tasks())
    (line,) = read_lines(out / "failures.jsonl")
    assert (line["_ng_failure_class"], line["_ng_failure_stage"], line["_ng_failure_terminal"]) == expected
    assert "reward" not in line


@pytest.mark.slow
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
async def test_a_masked_or_invalid_reward_is_never_scored(
    out: Path, tasks: Tasks, fields: dict[str, Any], kind: str
) -> None:
    async with NemoGymServers(lambda row, number: {**reply_four(row, number), **fields}).serve() as servers:
        (figures,) = await _run(out, head=servers.head, tasks=tasks(), attempts=3)
    (line,) = read_lines(out / "failures.jsonl")
    assert (line["_ng_failure_class"], len(servers.sent)) == (kind, 1)
    assert (out / "rollouts.jsonl").read_bytes() == b""
    assert "mean/reward" not in figures["agent_metrics"]


class DroppedConnection(NemoGymServers):
    """Servers that drop the connection in the middle of their first reply."""

    def app(self) -> Any:
        app = super().app()
        dropped: list[str] = []

        async def drop_first_reply(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] != "http" or scope["path"] != "/run" or dropped:
                await app(scope, receive, send)
                return
            message = await receive()
            dropped.append("answer")
            self.sent.append(json.loads(message["body"]))
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"9")]})
            # The connection ends in the middle of the body.
            await send({"type": "http.response.body", "body": b"{", "more_body": True})

        return drop_first_reply


@pytest.mark.slow
async def test_a_lost_reply_is_requested_again_where_the_server_plays_each_id_once(out: Path, tasks: Tasks) -> None:
    async with DroppedConnection(about={"gymsdk_version": "0.1.0"}).serve() as ours:
        await _run(out, head=ours.head, tasks=tasks())
    ids = [row["_ng_rollout_id"] for row in ours.sent]
    assert len(ids) == 2
    assert ids[0] == ids[1]
    assert read_lines(out / "rollouts.jsonl")[0]["gymsdk"]["attempts"] == 1


async def test_a_lost_reply_of_another_server_is_not_requested_again_under_its_id(out: Path, tasks: Tasks) -> None:
    async with DroppedConnection().serve() as servers:
        await _run(out, head=servers.head, tasks=tasks())
    assert len(servers.sent) == 1
    assert read_lines(out / "failures.jsonl")[0]["_ng_failure_class"] == "server_unreachable"


async def test_an_agent_that_has_moved_is_looked_up_again() -> None:
    job = Job("sums", 0, 0, {"responses_create_params": {"input": "?"}, "agent_ref": {"name": "sums_simple_agent"}})
    async with NemoGymServers().serve() as servers:
        client = ServerClient(servers.head)
        player = RemotePlayer(AgentClient(client, retry=Retry(times=0, first=0.01)), attempts=1)
        address, servers.head = servers.head, "http://127.0.0.1:9"
        assert await client.url("sums_simple_agent") == servers.head
        servers.head = address
        played = await player(job)
    assert (played.rollout.outcome, played.attempts, len(servers.sent)) == ("scored", 1, 1)


async def test_an_agent_that_the_head_has_lost_fails_its_rollout() -> None:
    async with NemoGymServers().serve() as servers:
        player = RemotePlayer(AgentClient(ServerClient(servers.head), agent_wait=0), attempts=1)
        played = await player(Job("sums", 0, 0, {"agent_ref": {"name": "strange"}}))
    assert played.rollout.failure is not None
    assert (played.rollout.failure.kind, played.rollout.failure.retryable) == ("server_unreachable", True)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"policy_model_name": "vllm/other"}, "the model of the servers was vllm/one, now vllm/other"),
        ({"gymsdk_version": "0.2"}, "the servers' version of gymsdk was not given, now 0.2"),
    ],
)
async def test_a_resume_with_different_servers_is_rejected(
    out: Path, tasks: Tasks, changed: dict[str, Any], expected: str
) -> None:
    about = {"policy_model_name": "vllm/one"}
    async with NemoGymServers(about=about).serve() as servers:
        await _run(out, head=servers.head, tasks=tasks())
        servers.about = about | changed
        with pytest.raises(BadOutput, match=expected):
            await _run(out, head=servers.head, tasks=tasks(), resume=True)


@pytest.mark.slow
async def test_a_reply_that_never_comes_has_a_deadline(out: Path, tasks: Tasks) -> None:
    class HangingServers(NemoGymServers):
        async def run(self, request: Request) -> Response:
            await asyncio.Event().wait()
            raise AssertionError

    async with HangingServers().serve() as servers:
        plan = {"head": servers.head, "tasks": tasks(), "budget": Budget(seconds=0.1)}
        await _run(out, breaker=0.2, **plan)
    (line,) = read_lines(out / "failures.jsonl")
    assert (line["_ng_failure_class"], line["_ng_failure_terminal"]) == ("server_timeout", False)


@pytest.mark.slow
async def test_a_run_stops_when_its_servers_are_gone_and_resumes_with_servers_that_have_moved(
    out: Path, tasks: Tasks
) -> None:
    async with NemoGymServers(lambda _row, _number: JSONResponse("broken", 500)).serve() as servers:
        with pytest.raises(ModelLost, match=r"64 rollouts failed for the same reason .* use --resume"):
            await _run(out, head=servers.head, tasks=tasks(count=200))
    async with NemoGymServers().serve() as servers:
        (figures,) = await _run(out, head=servers.head, tasks=tasks(count=200), resume=True)
    assert (figures["outcomes"], len(servers.sent)) == ({"scored": 200}, 200)


async def test_an_agent_with_a_custom_name_is_called_by_it(out: Path, tasks: Tasks) -> None:
    row = {"responses_create_params": {"input": "2 + 2"}, "answer": 4, "agent_ref": {"name": "my_own"}}
    async with NemoGymServers(agent="my_own").serve() as servers:
        (figures,) = await _run(out, head=servers.head, tasks=tasks(row))
    assert figures["agent_ref"] == {"name": "my_own"}
    assert read_lines(out / "rollouts.jsonl")[0]["agent_ref"]["name"] == "my_own"


@pytest.mark.slow
async def test_a_row_without_an_agent_is_for_the_named_environment(out: Path, tasks: Tasks) -> None:
    row = {"responses_create_params": {"input": "?"}, "answer": 4}
    async with NemoGymServers().serve() as servers:
        with pytest.raises(BadRow, match=r"does not name its agent; add `agent_ref.name`"):
            await _run(out, head=servers.head, tasks=tasks(row))
        await _run(out, head=servers.head, tasks=tasks(row), environments={"sums": {}})
    assert servers.sent[0]["agent_ref"]["name"] == "sums_simple_agent"


@pytest.mark.slow
async def test_a_head_that_has_just_started_is_waited_for(out: Path, tasks: Tasks) -> None:
    servers, requests = NemoGymServers(), 0

    def config() -> str:
        nonlocal requests
        requests += 1
        # The first two requests find no agent.
        return "{}" if requests < 3 else servers.config()

    app = FastAPI()
    app.add_api_route("/global_config_dict_yaml", config, methods=["GET"])
    app.add_api_route("/nodes", lambda: {"settled": False}, methods=["GET"])
    app.add_api_route("/run", servers.run, methods=["POST"])
    async with serve_app(app) as (host, port):
        servers.head = f"http://{host}:{port}"
        await _run(out, head=servers.head, tasks=tasks(count=2))
    assert (requests >= 3, len(read_lines(out / "rollouts.jsonl"))) == (True, 2)


async def test_wrong_agents_and_heads_are_rejected_before_anything_is_written(out: Path, tasks: Tasks) -> None:
    with pytest.raises(UsageError, match=r"write it as a URL, as in http://127.0.0.1:11000"):
        await _run(out, head="localhost:11000", tasks=tasks())
    row = {"responses_create_params": {"input": "?"}, "agent_ref": {"name": "sumz_simple_agent"}}
    async with NemoGymServers().serve() as servers:
        with pytest.raises(Failed, match="check that it is a head server"):
            await _run(out, head=f"{servers.head}/elsewhere", tasks=tasks())
        with pytest.raises(UnknownServer, match=r"tasks.jsonl:1: .* knows no agent 'sumz_simple_agent'; did you mean"):
            await _run(out, head=servers.head, tasks=tasks(row))
        with pytest.raises(UnknownServer, match="knows no agent 'math_simple_agent'"):
            await _run(out, head=servers.head, environments={"math": {}}, limit=1)
    assert _is_missing(out)
