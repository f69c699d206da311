"""Almost valid bodies: a server answers every malformed value without failing."""

from __future__ import annotations

import json

import httpx
import orjson
import pytest

import gymsdk
from gymsdk import Task, responses
from gymsdk.servers import agent, environment, model, resources
from gymsdk.servers.remote import RemoteEnvironment
from gymsdk.testing.endpoint import build_app, serve
from gymsdk.types import Item

from .app_helpers import app_client
from .engines import FixedModel

TOOLS = [{"type": "function", "name": "increment_counter", "parameters": {"type": "object", "properties": {}}}]
IDS = {"rollout_id": "r1", "attempt": 0}
TASK_ID = {"taskset": "t", "task_id": "1"}
ACCESS = {"kind": "direct_http", "name": "n", "base_url": "http://127.0.0.1:9", "cookies": {"a": "b"}, "headers": {}}
OPENING = {"agent_session_id": "s", "episode_id": IDS, "task_id": TASK_ID, "tool_accesses": [ACCESS]}


def dump(body: object) -> bytes:
    try:
        return orjson.dumps(body)
    except TypeError:
        return json.dumps(body).encode()


ODD_VALUES = (None, True, -1, 2**70, 1e308, "", "\ud800", "x y", [], [None], {}, {"": None}, {"type": 3, "name": []})
NUMBERS = ("_ng_rollout_id", "_ng_task_index", "_ng_rollout_index", "_ng_attempt_index", "capture_rollout_id")


@pytest.mark.parametrize("field", [*NUMBERS, "gymsdk", "agent_ref", "responses_create_params", "initial_count"])
async def test_a_row_with_an_odd_value_gets_a_response(counter, policy, field):
    row = Task.ask("add", initial_count=1, expected_count=3).row()
    for create_app in (agent.create_app, environment.create_app):
        async with app_client(create_app(counter(), policy("done"))) as client:
            for odd in ODD_VALUES:
                answer = await client.post("/run", content=dump(row | {field: odd}))
                assert answer.status_code in {200, 400, 409, 422, 503}, (odd, answer.text)
                assert answer.status_code == 200 or answer.json().keys() & {"detail", "error"}


MESSAGE: Item = {"type": "message", "role": "assistant"}
OUTPUTS: tuple[tuple[Item, str], ...] = (
    (MESSAGE | {"role": {}, "content": "x"}, "response.output.0.role"),
    (MESSAGE | {"content": [1]}, "response.output.0.content"),
    (MESSAGE | {"content": [{"type": []}]}, "response.output.0.content.0.type"),
    ({"type": "function_call_output", "call_id": "c", "output": {"a": 1}}, "response.output.0.output"),
    ({"type": "reasoning", "summary": "x"}, "response.output.0.summary"),
    ({"type": {}, "content": "x"}, "response.output.0.type"),
)
PROMPTS: tuple[tuple[Item, str], ...] = (
    ({"role": [], "content": "x"}, "input.0.role"),
    ({"role": "user", "content": [["x"]]}, "input.0.content"),
    ({"role": "user", "content": 5}, "input.0.content"),
    ({"type": "function_call_output", "output": {"a": 1}}, "input.0.output"),
    ({"type": "function_call", "arguments": "{}"}, "input.0.name"),
)


@pytest.mark.parametrize("seed", ["/seed_session", "/reset"])
async def test_an_odd_response_at_an_open_session_is_refused_with_its_field(resources_client, seed):
    row = Task.ask("add", initial_count=1, expected_count=1).row()
    async with resources_client() as client:
        (await client.post(seed, json=row)).raise_for_status()
        for item, field in OUTPUTS:
            for path in ("/verify", "/step"):
                answer = await client.post(path, json={**row, "response": {"output": [item]}})
                assert (answer.status_code, f"`{field}`" in answer.json()["detail"]) == (422, True), answer.text
        for item, field in PROMPTS:
            odd = {**row, "responses_create_params": {"input": [item]}}
            answer = await client.post("/verify", json={**odd, "response": {"output": []}})
            assert (answer.status_code, field in answer.json()["detail"]) == (422, True), answer.text
        # A role that gymsdk does not know is no error.
        known = {"type": "message", "role": "critic", "content": "x"}
        path = "/verify" if seed == "/seed_session" else "/step"
        assert (await client.post(path, json={**row, "response": {"output": [known]}})).status_code == 200


PARAMETERS: tuple[tuple[Item, str], ...] = (
    ({"input": None}, "input"),
    ({"input": 5}, "input"),
    *(({"input": [item]}, field) for item, field in PROMPTS),
    ({"tools": [{}]}, "tools.0.name"),
    ({"tools": [{"type": "function", "name": []}]}, "tools.0.name"),
    ({"tools": [{"type": "function", "name": "f", "parameters": []}]}, "tools.0.parameters"),
    ({"instructions": {"a": 1}}, "instructions"),
    ({"max_output_tokens": "auto"}, "max_output_tokens"),
    ({"metadata": "x"}, "metadata"),
    ({"reasoning": []}, "reasoning"),
    ({"text": {"format": 5}}, "text.format"),
    ({"text": {"format": {"type": {}}}}, "text.format.type"),
)


@pytest.mark.parametrize("api", ["chat", "responses"])
async def test_an_odd_request_is_refused_with_its_field_before_it_reaches_the_model(counter, api):
    # Nothing listens at this address: a request that reached the model would be answered with 503.
    upstream = gymsdk.model("vllm/m", base_url="http://127.0.0.1:9/v1", api=api, retries=0)
    remote = RemoteEnvironment("http://127.0.0.1:9", "counter")
    for create, path, prefix in (
        (agent.create_app(counter(), upstream, resources=remote), "/v1/responses", ""),
        (agent.create_app(counter(), upstream), "/run", "responses_create_params"),
        (model.create_app(upstream), "/v1/responses", ""),
    ):
        async with app_client(create) as client:
            for change, field in PARAMETERS:
                params = {"input": "hi", **change}
                answer = await client.post(path, json={prefix: params} if prefix else params)
                assert answer.status_code in {400, 422}, (path, change, answer.text)
                assert field in answer.text, (path, change, answer.text)


async def test_a_tool_call_in_an_agent_session_without_tools_gets_an_error_output(counter, policy):
    opening = {key: value for key, value in OPENING.items() if key != "tool_accesses"}
    for body in ({"input": "hi"}, {"input": "hi", "tools": TOOLS}):
        says = policy([("increment_counter", {"count": 1})], "done")
        async with app_client(agent.create_app(counter(), says)) as client:
            (await client.post("/v1/agent_sessions", json=opening)).raise_for_status()
            answer = await client.post("/v1/responses", json=body)
        assert answer.status_code == 200, answer.text
        output = answer.json()["output"]
        assert [item["type"] for item in output] == ["function_call", "function_call_output", "message"]
        assert "no tool named" in output[1]["output"]


async def test_a_call_of_a_tool_whose_name_is_no_unicode_gets_an_error_output(counter, policy, serve_app):
    says = policy([("\ud800", {})], "done")
    async with serve_app(resources.create_app(counter())) as url, httpx.AsyncClient(base_url=url) as client:
        seeded = await client.post("/seed_session", json=Task.ask("add", initial_count=1).row())
        remote = RemoteEnvironment(url, "counter")
        async with app_client(agent.create_app(counter(), says, resources=remote)) as caller:
            body = {"input": "hi", "tools": [{"type": "function", "name": "\ud800", "parameters": {}}]}
            cookies = "; ".join(f"{name}={value}" for name, value in seeded.cookies.items())
            answer = await caller.post("/v1/responses", content=dump(body), headers={"cookie": cookies})
    assert answer.status_code == 200, answer.text


async def test_the_policy_endpoint_refuses_odd_bodies_without_a_traceback(caplog):
    derender, generate = "/v1/chat/completions/derender", "/inference/v1/generate"
    async with serve(build_app(FixedModel(responses.build_message("hi")))) as base, httpx.AsyncClient() as client:
        for path, body, headers in (
            (derender, b"{}", {}),
            (derender, b'{"generate_response": {"choices": [{"token_ids": ["x"]}]}}', {}),
            (derender, b'{"generate_response": {"choices": []}}', {}),
            (generate, b'{"token_ids": [], "sampling_params": [[]]}', {}),
            (generate, b'{"token_ids": [], "sampling_params": {"max_tokens": "auto"}}', {}),
            ("/v1/completions", b'{"prompt": [], "max_tokens": {"a": 5}}', {}),
            ("/v1/chat/completions", b'{"messages": [], "max_tokens": "auto"}', {}),
            ("/v1/responses", b'{"input": "hi"}', {"content-encoding": "gzip"}),
            ("/tokenize", b'{"prompt": "hi"}', {"content-encoding": "gzip"}),
        ):
            url = base.removesuffix("/v1") + path
            answer = await client.post(url, content=body, headers=headers)
            unknown = await client.request("BREW", url)
            assert (answer.status_code, unknown.status_code) == (400, 400), (path, answer.text)
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []
