"""The oracle over HTTP: agents that use it as their model score what a perfect policy scores."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import islice

import httpx
import pytest

from gymsdk import Environment, Model, load, model, responses, testing
from gymsdk.convert import chat
from gymsdk.deploy.process import serve
from gymsdk.testing.oracle import open_oracle
from gymsdk.types import Item, Row, extract_text

NAMES = ("math", "tool_call", "multineedle")
COUNT = 20
SYSTEM = ("system", "developer")


pytestmark = pytest.mark.usefixtures("close_client")


def rows_of(environment: Environment, *, count: int = COUNT) -> list[Row]:
    return [task.row() for task in islice(environment.tasks("train"), count)]


async def post(client: httpx.AsyncClient, url: str, body: Item) -> Item:
    answer = await client.post(url, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.slow
@pytest.mark.parametrize("api", ["chat", "responses"])
async def test_agents_whose_model_is_the_endpoint_behind_a_proxy_score_the_maximum(api):
    environments = [load(name) for name in NAMES]
    named = {environment.name: environment for environment in environments}

    def build_model(url: str) -> Model:
        return model("endpoint/policy", base_url=url, api=api)

    async with (
        open_oracle(named, model("scripted/oracle")) as oracle,
        testing.serve(testing.build_app(oracle)) as url,
        serve(environments[:1], model=build_model(url)) as proxy,
        serve(environments, model=build_model(f"{proxy.urls['policy_model']}/v1")) as running,
        httpx.AsyncClient(timeout=60) as client,
    ):
        for environment in environments:
            agent = running.urls[f"{environment.name}_simple_agent"]
            played = [await post(client, f"{agent}/run", row) for row in rows_of(environment)]
            assert [played_row["reward"] for played_row in played] == [1.0] * COUNT, environment.name


class ForeignAgent:
    """An agent that plays rows only over HTTP: tools and verdict at *resources*, turns at *policy_model*."""

    def __init__(self, resources: str, policy_model: str, build_request: Callable[[Item], tuple[str, Item]]) -> None:
        self._resources = resources
        self._policy_model = policy_model
        self._build_request = build_request

    async def play(self, row: Row) -> float:
        async with httpx.AsyncClient(timeout=60) as client:
            await post(client, f"{self._resources}/seed_session", row)
            params = row["responses_create_params"]
            items: list[Item] = []
            while not items or items[-1]["type"] != "message":
                path, body = self._build_request({**params, "input": [*params["input"], *items]})
                items += parse_output(await post(client, f"{self._policy_model}/v1/{path}", body))
                for call in [item for item in items if item["type"] == "function_call"]:
                    if all(item.get("call_id") != call["call_id"] or item is call for item in items):
                        arguments = json.loads(call["arguments"])
                        result = await client.post(f"{self._resources}/{call['name']}", json=arguments)
                        items.append(responses.build_function_call_output(call["call_id"], result.text))
            judged = await post(client, f"{self._resources}/verify", {**row, "response": {"output": items}})
        return judged["reward"]


def parse_output(answer: Item) -> list[Item]:
    """Return the content of a response of any API as output items."""
    if "output" in answer:
        return list(answer["output"])
    if "choices" in answer:
        return list(chat.parse_completion(answer, {})["output"])
    return [
        responses.build_message(block["text"])
        if block["type"] == "text"
        else responses.build_function_call(block["name"], block["input"], block["id"])
        for block in answer["content"]
    ]


def build_messages_request(request: Item) -> Item:
    """Return a request as Anthropic's clients write it."""
    messages_sent: list[Item] = []
    for item in request["input"]:
        role, block = to_block(item)
        if role not in SYSTEM:
            messages_sent.append({"role": role, "content": [block]})
    system = [extract_text(item["content"]) for item in request["input"] if item.get("role") in SYSTEM]
    return {"model": "policy", "max_tokens": 999, "system": "\n\n".join(system), "messages": messages_sent}


def to_block(item: Item) -> tuple[str, Item]:
    if "output" in item:
        return "user", {"type": "tool_result", "tool_use_id": item["call_id"], "content": item["output"]}
    if "arguments" in item:
        block = {"type": "tool_use", "id": item["call_id"], "name": item["name"]}
        return "assistant", block | {"input": json.loads(item["arguments"])}
    return item["role"], {"type": "text", "text": extract_text(item["content"])}


BUILD_REQUEST: dict[str, Callable[[Item], tuple[str, Item]]] = {
    "responses": lambda request: ("responses", request),
    "chat": lambda request: ("chat/completions", chat.build_body(request)),
    "messages": lambda request: ("messages", build_messages_request(request)),
}


@pytest.mark.slow
@pytest.mark.parametrize("api", BUILD_REQUEST)
async def test_a_foreign_agent_scores_the_maximum_with_the_default_servers(api):
    environments = [load(name) for name in NAMES]
    async with serve(environments) as running:
        for environment in environments:
            agent = ForeignAgent(running.urls[environment.name], running.urls["policy_model"], BUILD_REQUEST[api])
            rewards = [await agent.play(row) for row in rows_of(environment)]
            assert rewards == [1.0] * COUNT, environment.name
