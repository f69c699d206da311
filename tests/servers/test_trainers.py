"""The exact requests of trainers and collectors that implement NeMo Gym's protocol."""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
from itertools import islice
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
import yaml
from omegaconf import OmegaConf

from gymsdk import load
from gymsdk.deploy.process import RunningServers, serve
from gymsdk.http import client as http

NAMES = ("math", "multineedle", "tool_call")
Json = dict[str, Any]


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running():
    async with serve(NAMES) as servers:
        yield servers
    await http.aclose()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client():
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


async def post(client: aiohttp.ClientSession, url: str, body: Json) -> tuple[int, Json]:
    async with client.post(url, json=body) as answer:
        return answer.status, await answer.json()


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
        return {key: add_null_fields(member) for key, member in value.items()} | {"elsewhere": None}
    return [add_null_fields(member) for member in value] if isinstance(value, list) else value


def build_minimal_response(text: str) -> Json:
    """Return the minimum that a trainer sends of a response."""
    content = [{"type": "output_text", "text": text, "annotations": []}]
    message = {"id": "msg", "role": "assistant", "type": "message", "status": "completed", "content": content}
    fields = {"id": "resp", "created_at": 0, "model": "policy", "object": "response", "output": [message]}
    return fields | {"parallel_tool_calls": True, "tool_choice": "auto", "tools": []}


async def test_every_server_is_found_in_the_configuration_and_answers_a_readiness_check(running, client):
    async with client.get(f"{running.head_url}/global_config_dict_yaml") as answer:
        config = OmegaConf.create(yaml.safe_load(await answer.text()))
    found = {}
    for name in config:
        with contextlib.suppress(KeyError, AttributeError):
            server = config[name].resources_servers[name]
            found[name] = f"http://{server.host}:{server.port}"
    assert found == {name: running.urls[name] for name in NAMES}
    parsed = await fetch_config(client, running)
    assert OmegaConf.to_container(config) == parsed
    agents = {
        name: f"http://{server['host']}:{server['port']}"
        for name, block in parsed.items()
        if isinstance(block, dict)
        for server in block.get("responses_api_agents", {}).values()
    }
    assert agents == {f"{name}_simple_agent": running.urls[f"{name}_simple_agent"] for name in NAMES}
    for name in NAMES:
        # A collector finds the environment server of each agent.
        ((_, block),) = parsed[f"{name}_environment_server"]["environment_servers"].items()
        assert block["agent_server"] == {"type": "responses_api_agents", "name": f"{name}_simple_agent"}
        ((_, agent),) = parsed[block["agent_server"]["name"]]["responses_api_agents"].items()
        assert {"entrypoint", "host", "port"} <= block.keys() & agent.keys()
    assert parsed["environment_server_routes"] == {name: f"{name}_environment_server" for name in NAMES}
    assert parsed["policy_model_name"] == "scripted/oracle"
    for url in (running.head_url, *running.urls.values()):
        async with client.get(f"{url}/") as answer:
            assert (answer.status, await answer.json()) == (200, {"status": "ok"})
    async with client.get(f"{running.head_url}/server_instances") as answer:
        instances = await answer.json()
    wanted = {"process_name", "server_type", "name", "host", "port", "url", "pid", "entrypoint", "start_time"}
    assert {instance["process_name"] for instance in instances} == set(running.urls)
    assert all(wanted <= instance.keys() and instance["status"] == "success" for instance in instances)


async def test_a_verdict_needs_a_row_and_a_minimal_response(running, client):
    for name in NAMES:
        row = {key: value for key, value in add_null_columns(first_row(name)).items() if value is not None}
        prompt = [{"role": "user", "content": row["responses_create_params"]["input"][0]["content"]}]
        response = build_minimal_response("I do not know")
        body = {**row, "responses_create_params": {"input": prompt}, "response": response}
        status, result = await post(client, f"{running.urls[name]}/verify", body)
        assert (status, result["reward"], result["response"]) == (200, 0.0, response)
    row = first_row("math")
    for text, reward in ((f"The answer is \\boxed{{{row['expected_answer']}}}.", 1.0), ("\\boxed{no idea}", 0.0)):
        body = add_null_columns(row) | {"response": build_minimal_response(text)}
        assert (await post(client, f"{running.urls['math']}/verify", body))[1]["reward"] == reward


async def test_a_row_is_run_with_the_trainers_sampling_and_sixty_four_at_once(running, client):
    for name in NAMES:
        row = add_null_columns(first_row(name))
        row["responses_create_params"] |= {"max_output_tokens": 512, "temperature": 1.0, "top_p": 1.0}
        status, result = await post(client, f"{running.urls[f'{name}_simple_agent']}/run", row)
        assert (status, result["reward"], "error" in result) == (200, 1.0, False)
        assert {item["type"] for item in result["response"]["output"]} & {"function_call", "message"}
    rows = [task.row() for task in islice(load("tool_call").tasks("train"), 64)]
    url = f"{running.urls['tool_call_simple_agent']}/run"
    answers = await asyncio.gather(*(post(client, url, row) for row in rows))
    assert [float(result["reward"]) for _, result in answers] == [1.0] * 64


async def test_metrics_are_reported_by_group_and_by_repeat(running, client):
    rewards = {(0, 0): 1.0, (0, 1): 0.0, (1, 0): 1.0, (1, 1): 1.0}
    rows: list[Json] = [{"_ng_failure_class": "x"}, {"_ng_task_index": 0, "reward": 0.0, "mask_sample": True}]
    rows += [
        {"reward": reward, "_ng_task_index": task, "_ng_rollout_index": repeat, "response": {"usage": {}}}
        for (task, repeat), reward in rewards.items()
    ]
    for server in ("math", "math_simple_agent", "math_environment_server"):
        url = f"{running.urls[server]}/aggregate_metrics"
        async with client.post(url, data=json.dumps({"verify_responses": rows})) as answer:
            result = await answer.json()
        assert result["agent_metrics"]["mean/reward"] == statistics.fmean(rewards.values())
        groups = result["group_level_metrics"]
        assert [(group["_ng_task_index"], group["mean/reward"]) for group in groups] == [(0, 0.5), (1, 1.0)]
        assert all({"min/reward", "max/reward", "rollout_infos"} <= group.keys() for group in groups)
        assert (len(result["repeat_level_metrics"]), bool(result["key_metrics"])) == (2, True)
