"""The three included environments over HTTP: tool outputs and rewards equal those in process."""

from __future__ import annotations

from contextlib import asynccontextmanager
from itertools import islice

import httpx
import pytest

from gymsdk import load, model, play
from gymsdk.servers import resources


@asynccontextmanager
async def app_client(environment):
    app = resources.create_app(environment)
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://gym.test") as client,
    ):
        yield client


def calls(items):
    outputs = {item["call_id"]: item["output"] for item in items if item["type"] == "function_call_output"}
    return [
        (item["name"], item["arguments"], outputs[item["call_id"]]) for item in items if item["type"] == "function_call"
    ]


@pytest.mark.parametrize("policy", ["oracle", "random"])
@pytest.mark.parametrize("name", ["math", "multineedle", "tool_call"])
async def test_an_episode_over_http_equals_the_episode_in_process(name, policy):
    environment = load(name)
    async with app_client(environment) as client:
        for number, task in enumerate(islice(environment.tasks("train"), 4)):
            rollout = await play(environment, model(f"scripted/{policy}"), task, seed=number)
            row, items = {**task.row(), "gymsdk": {"seed": number}}, rollout.response["output"]
            await client.post("/seed_session", json=row)
            for called, arguments, output in calls(items):
                if called in environment.tools:
                    assert (await client.post(f"/{called}", content=arguments)).text == output
            body = {**row, "response": rollout.response}
            with_session = (await client.post("/verify", json=body)).json()
            client.cookies.clear()
            without = (await client.post("/verify", json=body)).json()
            fields = rollout.verdict.model_dump(mode="json", exclude={"reward", "components"})
            assert without == with_session
            assert fields.items() <= without.items()
            assert without["reward"] == rollout.reward
            assert without.get("reward_components", {}) == rollout.components
