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
    """Yield a client like a trainer's: no cookie jar, many connections to one host, a long read timeout."""
    connector = aiohttp.TCPConnector(limit_per_host=64)
    timeout = aiohttp.ClientTimeout(total=None, sock_read=10800)
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, cookie_jar=aiohttp.DummyCookieJar()
    ) as session:
        yield session


async def fetch_config(client: aiohttp.ClientSession, running: RunningServers) -> Any:
    """Return the head's configuration, parsed until it is no longer a string."""
    async with client.get(f"{running.head_url}/global_config_dict_yaml") as answer:
        config = yaml.safe_load(await answer.text())
    return yaml.safe_load(config) if isinstance(config, str) else config


def first_row(name: str) -> Json:
    return next(iter(load(name).tasks("validation"))).row()


def add_null_columns(row: Json) -> Json:
    """Return a row as in a table of many environments: columns of other environments are null, at every depth."""
    params = {
        **row["responses_create_params"],
        "input": [{**item, "name": None, "tool_calls": None} for item in row["responses_create_params"]["input"]],
        "tools": None,
        "parallel_tool_calls": None,
        "metadata": {"extra_body": None},
    }
    own = {key: add_null_fields(value) for key, value in row.items()}
    return {**own, "responses_create_params": params, "verifier_metadata": {"source": None}, "dataset": None}


def add_null_fields(value: Any) -> Any:
    """Return a value with one more field, which is null, in each of its objects."""
    if isinstance(value, dict):
        return {key: add_null_fields(each) for key, each in value.items()} | {"elsewhere": None}
    return [add_null_fields(each) for each in value] if isinstance(value, list) else value


def build_minimal_response(text: str) -> Json:
    """Return the minimum that a trainer sends of a response."""
    content = [{"type": "output_text", "text": text, "annotations": []}]
    message = {"id": "msg", "role": "assistant", "type": "message", "status": "completed", "content": content}
    return {
        "id": "resp",
        "created_at": 0,
        "model": "policy",
        "object": "response",
        "output": [message],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
    }


@pytest.mark.slow
async def test_omegaconf_and_a_second_parse_find_every_resources_server(
    running: RunningServers, client: aiohttp.ClientSession
) -> None:
    async with client.get(f"{running.head_url}/global_config_dict_yaml") as answer:
        config = OmegaConf.create(yaml.safe_load(await answer.text()))
    found = {}
    for name in config:
        try:
            server = config[name].resources_servers[name]
        except (KeyError, AttributeError):
            continue
        found[name] = f"http://{server.host}:{server.port}"
    assert found == {name: running.urls[name] for name in NAMES}
    assert OmegaConf.to_container(config) == await fetch_config(client, running)


@pytest.mark.slow
async def test_agents_are_found_by_their_kind(running: RunningServers, client: aiohttp.ClientSession) -> None:
    config = await fetch_config(client, running)
    found = {
        name: f"http://{server['host']}:{server['port']}"
        for name, block in config.items()
        if isinstance(block, dict)
        for server in block.get("responses_api_agents", {}).values()
    }
    assert found == {f"{name}_simple_agent": running.urls[f"{name}_simple_agent"] for name in NAMES}


@pytest.mark.slow
async def test_every_server_answers_a_readiness_check(running: RunningServers, client: aiohttp.ClientSession) -> None:
    for url in (running.head_url, *running.urls.values()):
        async with client.get(f"{url}/") as answer:
            assert (answer.status, await answer.json()) == (200, {"status": "ok"})


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
async def test_a_verdict_needs_a_row_and_a_minimal_response(
    running: RunningServers, client: aiohttp.ClientSession, name: str
) -> None:
    row = {key: value for key, value in add_null_columns(first_row(name)).items() if value is not None}
    prompt = [{"role": "user", "content": row["responses_create_params"]["input"][0]["content"]}]
    body = {**row, "responses_create_params": {"input": prompt}, "response": build_minimal_response("I do not know")}
    async with client.post(f"{running.urls[name]}/verify", json=body) as answer:
        result = await answer.json()
    assert (answer.status, result["reward"]) == (200, 0.0)
    assert result["response"] == body["response"]


async def test_right_and_wrong_answers_are_distinguished(
    running: RunningServers, client: aiohttp.ClientSession
) -> None:
    row, rewards = first_row("math"), []
    for text in (f"The answer is \\boxed{{{row['expected_answer']}}}.", "\\boxed{no idea}"):
        body = add_null_columns(row) | {"response": build_minimal_response(text)}
        async with client.post(f"{running.urls['math']}/verify", json=body) as answer:
            rewards.append((await answer.json())["reward"])
    assert rewards == [1.0, 0.0]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
async def test_a_row_is_run_with_the_trainers_sampling(
    running: RunningServers, client: aiohttp.ClientSession, name: str
) -> None:
    row = add_null_columns(first_row(name))
    row["responses_create_params"] |= {"max_output_tokens": 512, "temperature": 1.0, "top_p": 1.0}
    async with client.post(f"{running.urls[f'{name}_simple_agent']}/run", json=row) as answer:
        result = await answer.json()
    assert (answer.status, result["reward"]) == (200, 1.0)
    assert "error" not in result
    kinds = {item["type"] for item in result["response"]["output"]}
    assert kinds & {"function_call", "message"}


async def test_sixty_four_concurrent_rows_are_all_run(running: RunningServers, client: aiohttp.ClientSession) -> None:
    rows = [task.row() for task in islice(load("tool_call").tasks("train"), 64)]

    async def run(row: Json) -> float:
        async with client.post(f"{running.urls['tool_call_simple_agent']}/run", json=row) as answer:
            return float((await answer.json())["reward"])

    assert await asyncio.gather(*map(run, rows)) == [1.0] * 64


@pytest.mark.slow
async def test_a_collector_finds_the_environment_server_of_each_agent(
    running: RunningServers, client: aiohttp.ClientSession
) -> None:
    config = await fetch_config(client, running)
    for name in NAMES:
        ((_, block),) = config[f"{name}_environment_server"]["environment_servers"].items()
        assert {"entrypoint", "host", "port"} <= block.keys()
        assert block["agent_server"] == {"type": "responses_api_agents", "name": f"{name}_simple_agent"}
        ((_, agent),) = config[block["agent_server"]["name"]]["responses_api_agents"].items()
        assert {"entrypoint", "host", "port"} <= agent.keys()


@pytest.mark.slow
async def test_a_collector_reads_the_instances(running: RunningServers, client: aiohttp.ClientSession) -> None:
    async with client.get(f"{running.head_url}/server_instances") as answer:
        result = await answer.json()
    wanted = {"process_name", "server_type", "name", "host", "port", "url", "pid", "entrypoint", "start_time"}
    assert {each["process_name"] for each in result} == set(running.urls)
    assert all(wanted <= each.keys() and each["status"] == "success" for each in result)


@pytest.mark.slow
async def test_an_episode_request_is_answered_with_its_ids_and_a_result(
    running: RunningServers, client: aiohttp.ClientSession
) -> None:
    row = first_row("tool_call")
    params = row.pop("responses_create_params")
    ids = {"episode_id": {"rollout_id": "r-1", "attempt": 1}, "task_id": {"taskset": "tool_call", "task_id": "0"}}
    task = {"task_id": ids["task_id"], "task_input": {"responses_create_params": params, "task_data": row}}
    body = {"episode_id": ids["episode_id"], "task": task}
    async with client.post(f"{running.urls['tool_call_environment_server']}/run", json=body) as answer:
        result = await answer.json()
    assert answer.status == 200
    assert {key: result[key] for key in ids} == ids
    assert result["result"]["reward"] == 1.0
    assert "failure" not in result
    assert not [key for key in result["result"] if key.startswith("_ng_")]


@pytest.mark.slow
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
            result = await answer.json()
        assert result["agent_metrics"]["mean/reward"] == statistics.fmean(rewards.values())
        groups = [(each["_ng_task_index"], each["mean/reward"]) for each in result["group_level_metrics"]]
        assert groups == [(0, 0.5), (1, 1.0)]
        assert all(
            {"min/reward", "max/reward", "rollout_infos"} <= each.keys() for each in result["group_level_metrics"]
        )
        assert len(result["repeat_level_metrics"]) == 2
        assert result["key_metrics"]
