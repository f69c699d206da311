"""Almost valid bodies: a server answers every malformed value without failing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import orjson
import pytest
from fastapi import FastAPI

from gymsdk import Environment, Task, responses
from gymsdk.models.scripted import ScriptedModel
from gymsdk.servers import agent, environment, model
from gymsdk.servers.remote import RemoteEnvironment
from gymsdk.types import Item

from .app_helpers import app_client

MALFORMED_VALUES = (
    None,
    True,
    -1,
    2**70,
    1e308,
    "",
    "\ud800",
    "x y",
    [],
    [None],
    {},
    {"": None},
    [[{}]],
    {"type": 3, "name": []},
)
TOOLS = [{"type": "function", "name": "increment_counter", "parameters": {"type": "object", "properties": {}}}]
PARAMS = {
    "input": [
        {"role": "system", "content": "be brief"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "add"}]},
        responses.build_function_call("increment_counter", {"count": 1}, "c1"),
        responses.build_function_call_output("c1", "ok"),
    ],
    "tools": TOOLS,
    "temperature": 0.5,
    "metadata": {"extra_body": "{}"},
}
GYMSDK_FIELDS = {"seed": 1, "repeat": 0, "budget": {"turns": 2, "tools": 3, "seconds": 5.0}, "verdict": ["final"]}
NUMBERS = {"_ng_task_index": 1, "_ng_rollout_index": 0, "_ng_attempt_index": 0, "_ng_rollout_id": "r1"}
ROW = Task.ask("add", initial_count=1, expected_count=3, nested={"a": 1}).row() | NUMBERS
ROW |= {"gymsdk": GYMSDK_FIELDS, "agent_ref": {"name": "counter_simple_agent"}, "responses_create_params": PARAMS}
IDS = {"rollout_id": "r1", "attempt": 0}
TASK_ID = {"taskset": "t", "task_id": "1"}
DATA = {"initial_count": 1, "agent_timeout_seconds": 5.0}
EPISODE = {"episode_id": IDS, "task": {"task_id": TASK_ID, "task_input": {"responses_create_params": PARAMS, **DATA}}}
ACCESS = {"kind": "direct_http", "name": "n", "base_url": "http://127.0.0.1:9", "cookies": {"a": "b"}, "headers": {}}
OPENING = {"agent_session_id": "s", "episode_id": IDS, "task_id": TASK_ID, "tool_accesses": [ACCESS]}
CHAT = {
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "c", "content": "ok"},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
    "response_format": {"type": "json_schema", "json_schema": {"name": "n"}},
    "max_tokens": 5,
}
ROWS = {"verify_responses": [ROW | {"reward": 1.0, "response": {"usage": {"total_tokens": 3}}}, {"reward": 0.5}]}


def list_paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield from list_paths(each, (*path, key))


def replace_value(body: Item, path: tuple[Any, ...], value: object) -> object:
    if not path:
        return value
    changed: Any = deepcopy(body)
    parent = changed
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = value
    return changed


def dump(body: object) -> bytes:
    try:
        return orjson.dumps(body)
    except TypeError:
        import json

        return json.dumps(body).encode()


APPS: dict[str, Callable[[Environment, ScriptedModel], FastAPI]] = {
    "agent": lambda environment, policy: agent.create_app(
        environment, policy, resources=RemoteEnvironment("http://127.0.0.1:9", "counter")
    ),
    "environment": environment.create_app,
    "model": lambda _, policy: model.create_app(policy),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("server", "path", "body"),
    [
        ("agent", "/run", ROW),
        ("agent", "/v1/responses", PARAMS),
        ("agent", "/v1/agent_sessions", OPENING),
        ("agent", "/v1/agent_sessions/close", {"agent_session_id": "s", "episode_id": IDS}),
        ("agent", "/aggregate_metrics", ROWS),
        ("environment", "/run", ROW),
        ("environment", "/run", EPISODE),
        ("model", "/v1/responses", PARAMS),
        ("model", "/v1/chat/completions", CHAT),
    ],
)
async def test_a_body_with_a_malformed_value_gets_a_response(
    counter: Callable[..., Environment], policy: Callable[..., ScriptedModel], server: str, path: str, body: Item
) -> None:
    async with app_client(APPS[server](counter(), policy("done"))) as client:
        assert (await client.post(path, json=body)).status_code == 200
        for value_path in list_paths(body):
            for each in MALFORMED_VALUES:
                answer = await client.post(path, content=dump(replace_value(body, value_path, each)))
                assert answer.status_code in {200, 400, 409, 422, 503}, (value_path, each, answer.text)
                assert answer.status_code == 200 or answer.json().keys() & {"detail", "error"}
