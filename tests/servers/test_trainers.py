"""The exact requests of trainers and collectors that implement NeMo Gym's protocol."""

from __future__ import annotations

import asyncio
import json
import statistics
from collections.abc import AsyncIterator
from itertools import islice
from typing import Any

import aiohttp
import pytest
import yaml
from omegaconf import OmegaConf

from gymsdk import load
from gymsdk.deploy.process import RunningServers, serve
from gymsdk.http import client as http

NAMES = ("math", "multineedle", "tool_call")
Json = dict[str, Any]


@pytest.fixture
async def running() -> AsyncIterator[RunningServers]:
    async with serve(NAMES) as servers:
        yield servers
    await http.aclose()


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    """A client as trainers have it: no jar, many connections to one host, patience for a long read."""
    connector = aiohttp.TCPConnector(limit_per_host=64)
    timeout = aiohttp.ClientTimeout(total=None, sock_read=10800)
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, cookie_jar=aiohttp.DummyCookieJar()
    ) as session:
        yield session


async def config_of(client: aiohttp.ClientSession, running: RunningServers) -> Any:
    """The head's configuration, parsed until it is no string any more."""
    async with client.get(f"{running.head_url}/global_config_dict_yaml") as answer:
        config = yaml.safe_load(await answer.text())
    return yaml.safe_load(config) if isinstance(config, str) else config


def row_of(name: str) -> Json:
    return next(iter(load(name).tasks("validation"))).row()


def filled(row: Json) -> Json:
    """A row as a table of many environments has it: a column that others have is null, at every depth."""
    params = {
        **row["responses_create_params"],
        "input": [{**item, "name": None, "tool_calls": None} for item in row["responses_create_params"]["input"]],
        "tools": None,
        "parallel_tool_calls": None,
        "metadata": {"extra_body": None},
    }
    own = {key: nulled(value) for key, value in row.items()}
    return {**own, "responses_create_params": params, "verifier_metadata": {"source": None}, "dataset": None}


def nulled(value: Any) -> Any:
    """A value with a field more in each of its objects, which is null."""
    if isinstance(value, dict):
        return {key: nulled(each) for key, each in value.items()} | {"elsewhere": None}
    return [nulled(each) for each in value] if isinstance(value, list) else value


def response_of(text: str) -> Json:
    """The least that a trainer sends of a response."""
    content = [{"type": "output_text", "text": text, "annotations": []}]
    said = {"id": "msg", "role": "assistant", "type": "message", "status": "completed", "content": content}
    return {
        "id": "resp",
        "created_at": 0,
        "model": "policy",
        "object": "response",
        "output": [said],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
    }


async def test_omegaconf_and_a_second_parse_find_every_resources_server(
    running: RunningServers, client: aiohttp.ClientSession
) -> None:
    async with client.get(f"{running.head_url}/global_config_dict_yaml") as answer:
        config = OmegaConf.create(yaml.safe_load(await answer.text()))
    found = {}
    for name in config:
        try:
            at = config[name].resources_servers[name]
        except (KeyError, AttributeError):
            continue
        found[name] = f"http://{at.host}:{at.port}"
    assert found == {name: running.urls[name] for name in NAMES}
    assert OmegaConf.to_container(config) == await config_of(client, running)


async def test_agents_are_found_by_their_kind(running: RunningServers, client: aiohttp.ClientSession) -> None:
    config = await config_of(client, running)
    found = {
        name: f"http://{at['host']}:{at['port']}"
        for name, block in config.items()
        if isinstance(block, dict)
        for at in block.get("responses_api_agents", {}).values()
    }
    assert found == {f"{name}_simple_agent": running.urls[f"{name}_simple_agent"] for name in NAMES}


async def test_every_server_answers_a_readiness_check(running: RunningServers, client: aiohttp.ClientSession) -> None:
    for url in (running.head_url, *running.urls.values()):
        async with client.get(f"{url}/") as answer:
            assert (answer.status, await answer.json()) == (200, {"status": "ok"})


@pytest.mark.parametrize("name", NAMES)
async def test_a_verdict_needs_a_row_and_a_minimal_response(
    running: RunningServers, client: aiohttp.ClientSession, name: str
) -> None:
    row = {key: value for key, value in filled(row_of(name)).items() if value is not None}
    prompt = [{"role": "user", "content": row["responses_create_params"]["input"][0]["content"]}]
    body = {**row, "responses_create_params": {"input": prompt}, "response": response_of("I do not know")}
    async with client.post(f"{running.urls[name]}/verify", json=body) as answer:
        told = await answer.json()
    assert (answer.status, told["reward"]) == (200, 0.0)
    assert told["response"] == body["response"]


async def test_right_and_wrong_answers_are_distinguished(
    running: RunningServers, client: aiohttp.ClientSession
) -> None:
    row, rewards = row_of("math"), []
    for text in (f"The answer is \\boxed{{{row['expected_answer']}}}.", "\\boxed{no idea}"):
        body = filled(row) | {"response": response_of(text)}
        async with client.post(f"{running.urls['math']}/verify", json=body) as answer:
            rewards.append((await answer.json())["reward"])
    assert rewards == [1.0, 0.0]


@pytest.mark.parametrize("name", NAMES)
async def test_a_row_is_run_with_the_trainers_sampling(
    running: RunningServers, client: aiohttp.ClientSession, name: str
) -> None:
    row = filled(row_of(name))
    row["responses_create_params"] |= {"max_output_tokens": 512, "temperature": 1.0, "top_p": 1.0}
    async with client.post(f"{running.urls[f'{name}_simple_agent']}/run", json=row) as answer:
        told = await answer.json()
    assert (answer.status, told["reward"]) == (200, 1.0)
    assert "error" not in told
    kinds = {item["type"] for item in told["response"]["output"]}
    assert kinds & {"function_call", "message"}


async def test_sixty_four_concurrent_rows_are_all_run(running: RunningServers, client: aiohttp.ClientSession) -> None:
    rows = [task.row() for task in islice(load("tool_call").tasks("train"), 64)]

    async def run(row: Json) -> float:
        async with client.post(f"{running.urls['tool_call_simple_agent']}/run", json=row) as answer:
            return float((await answer.json())["reward"])

    assert await asyncio.gather(*map(run, rows)) == [1.0] * 64


async def test_a_collector_finds_the_environment_server_of_each_agent(
    running: RunningServers, client: aiohttp.ClientSession
) -> None:
    config = await config_of(client, running)
    for name in NAMES:
        ((_, block),) = config[f"{name}_environment_server"]["environment_servers"].items()
        assert {"entrypoint", "host", "port"} <= block.keys()
        assert block["agent_server"] == {"type": "responses_api_agents", "name": f"{name}_simple_agent"}
        ((_, agent),) = config[block["agent_server"]["name"]]["responses_api_agents"].items()
        assert {"entrypoint", "host", "port"} <= agent.keys()


async def test_a_collector_reads_the_instances(running: RunningServers, client: aiohttp.ClientSession) -> None:
    async with client.get(f"{running.head_url}/server_instances") as answer:
        told = await answer.json()
    wanted = {"process_name", "server_type", "name", "host", "port", "url", "pid", "entrypoint", "start_time"}
    assert {each["process_name"] for each in told} == set(running.urls)
    assert all(wanted <= each.keys() and each["status"] == "success" for each in told)


async def test_an_episode_request_is_answered_with_its_ids_and_a_result(
    running: RunningServers, client: aiohttp.ClientSession
) -> None:
    row = row_of("tool_call")
    params = row.pop("responses_create_params")
    ids = {"episode_id": {"rollout_id": "r-1", "attempt": 1}, "task_id": {"taskset": "tool_call", "task_id": "0"}}
    task = {"task_id": ids["task_id"], "task_input": {"responses_create_params": params, "task_data": row}}
    body = {"episode_id": ids["episode_id"], "task": task}
    async with client.post(f"{running.urls['tool_call_environment_server']}/run", json=body) as answer:
        told = await answer.json()
    assert answer.status == 200
    assert {key: told[key] for key in ids} == ids
    assert told["result"]["reward"] == 1.0
    assert "failure" not in told
    assert not [key for key in told["result"] if key.startswith("_ng_")]


async def test_metrics_are_reported_by_group_and_by_repeat(
    running: RunningServers, client: aiohttp.ClientSession
) -> None:
    rewards = {(0, 0): 1.0, (0, 1): 0.0, (1, 0): 1.0, (1, 1): 1.0}
    rows = [
        {"reward": reward, "_ng_task_index": task, "_ng_rollout_index": repeat, "response": {"usage": {}}}
        for (task, repeat), reward in rewards.items()
    ]
    for server in ("math", "math_simple_agent", "math_environment_server"):
        url = f"{running.urls[server]}/aggregate_metrics"
        async with client.post(url, data=json.dumps({"verify_responses": rows})) as answer:
            told = await answer.json()
        assert told["agent_metrics"]["mean/reward"] == statistics.fmean(rewards.values())
        groups = [(each["_ng_task_index"], each["mean/reward"]) for each in told["group_level_metrics"]]
        assert groups == [(0, 0.5), (1, 1.0)]
        assert all({"min/reward", "max/reward", "rollout_infos"} <= each.keys() for each in told["group_level_metrics"])
        assert len(told["repeat_level_metrics"]) == 2
        assert told["key_metrics"]
