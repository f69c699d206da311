"""The trajectory and the captured model calls that NeMo Gym 0.7 reads beside the reward."""

from __future__ import annotations

import asyncio
import fcntl
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from gymsdk import load
from gymsdk.config.model import Deployment
from gymsdk.deploy import process
from gymsdk.deploy.process import RunningServers
from gymsdk.http import client as http
from gymsdk.rollouts.jobs import build_input_row

NAME = "multineedle"


def _row() -> dict[str, Any]:
    task = next(iter(load(NAME).tasks("validation", seed=0)))
    return build_input_row(task.row(), environment=NAME, task=3, repeat=1)


def _calls(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@asynccontextmanager
async def serve(folder: Path, model: str) -> AsyncIterator[tuple[httpx.AsyncClient, RunningServers, str]]:
    """Serve the environment and capture the calls of *model* in *folder*; yield the URL of its environment server."""
    async with process.serve([NAME], deployment=Deployment(capture=folder), model=model) as running:
        async with httpx.AsyncClient(timeout=60) as client:
            yield client, running, f"{running.urls[f'{NAME}_environment_server']}/run"
        await http.aclose()


async def test_a_flat_row_returns_its_trajectory_and_its_model_calls_are_captured(tmp_path):
    async with serve(tmp_path, "scripted/oracle") as (client, running, url):
        line = (await client.post(url, json=_row())).json()
        config = (await client.get(f"{running.head_url}/global_config_dict_yaml")).json()
    trajectory = line["ng_trajectory"]
    output = line["response"]["output"]
    (invocation,) = trajectory["invocations"]
    assert (trajectory["task_id"], trajectory["rollout_id"], trajectory["gaps"]) == ("3", "3-1", [])
    assert invocation["status"] == "completed"
    assert len(invocation["conversation"]) == len(line["responses_create_params"]["input"]) + len(output)
    calls = [item for item in output if item["type"] == "function_call"]
    assert [call["tool_call_id"] for call in trajectory["tool_calls"]] == [call["call_id"] for call in calls]
    assert len(trajectory["turns"]) == line["gymsdk"]["turns"] > 1
    assert trajectory["turns"][-1]["step_count"] == len(calls)
    assert [turn["turn_no"] for turn in trajectory["turns"]] == list(range(1, len(trajectory["turns"]) + 1))
    tokens = sum(call["token_stats"]["completion_tokens"] for call in trajectory["model_calls"])
    assert tokens == line["response"]["usage"]["output_tokens"]
    captured = _calls(tmp_path / "3-1.capture.jsonl")
    assert [call["model_call_id"] for call in captured] == [call["model_call_id"] for call in trajectory["model_calls"]]
    assert {(call["status_code"], call["error_category"]) for call in captured} == {(200, None)}
    assert yaml.safe_load(config)["model_call_capture_dir"] == str(tmp_path)


async def test_an_episode_returns_the_agents_observations(tmp_path):
    row = _row()
    task_input = {key: row[key] for key in row if not key.startswith("_ng_") and key != "agent_ref"}
    ids = {"episode_id": {"rollout_id": "r1", "attempt": 2}}
    body = ids | {"task": {"task_id": {"taskset": NAME, "task_id": "7"}, "task_input": task_input}}
    async with serve(tmp_path, "scripted/oracle") as (client, _, url):
        answer = await client.post(url, json=body)
    result = answer.json()["result"]
    invocation, *tools = result["ng_agent_observations"]["records"]
    names = [call["model_call_id"] for call in _calls(tmp_path / "r1-a2.capture.jsonl")]
    assert [call["model_call_id"] for call in invocation["model_calls"]] == names
    assert {call["status"] for call in tools} == {"completed"}
    assert "ng_trajectory" not in result


@pytest.mark.slow
async def test_the_model_server_captures_calls_by_the_rollout_in_their_path(tmp_path):
    async with serve(tmp_path, "scripted/null") as (client, running, _):
        for path in ("/ng-rollout/r9/v1/responses", "/v1/responses"):
            await client.post(running.urls["policy_model"] + path, json={"input": "hello"})
    assert [*map(str, tmp_path.rglob("*"))] == [str(tmp_path / "r9.capture.jsonl")]
    (call,) = _calls(tmp_path / "r9.capture.jsonl")
    assert call["model_ref"] == {"type": "responses_api_models", "name": "policy_model"}
    assert call["response"]["object"] == "response"


@pytest.mark.slow
async def test_an_episode_does_not_wait_for_a_disk_that_hangs(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("gymsdk.servers.capture.MAX_WRITE_SECONDS", 0.2)
    path = tmp_path / "3-1.capture.jsonl"
    async with serve(tmp_path, "scripted/null") as (client, _, url):
        # Another process that holds a lock on the file blocks every writer, as a hanging disk does.
        with path.open("ab") as locked:
            fcntl.flock(locked.fileno(), fcntl.LOCK_EX)
            answer = await client.post(url, json=_row())
            captured = path.read_text()
    assert (answer.status_code, answer.json()["gymsdk"]["outcome"], captured) == (200, "scored", "")
    assert "a model call of rollout 3-1 was not captured" in caplog.text
    async with asyncio.timeout(30):
        # Late lines are still written: one for each turn.
        while path.read_bytes().count(b"\n") < answer.json()["gymsdk"]["turns"]:  # noqa: ASYNC110  # a file has no event
            await asyncio.sleep(0.05)
