"""Agents that POST every tool name with the session's cookie: calling an endpoint as a tool gains nothing."""

from __future__ import annotations

import random

import httpx
import pytest

from gymsdk import Environment, responses
from gymsdk.types import Item

SECRET = """
class Hidden(State):
    secret: int = 0
    tries: int = 0

@hookimpl
async def reset(task, seed):
    return Reset(state=Hidden(secret=random.Random(seed).randrange(10**6)))

async def peek(state: State) -> str:
    "Read the secret once."
    state.tries += 1
    return str(state.secret)

@hookimpl
def tools():
    return [peek]

class Told(Verdict):
    tries: int = 0

@hookimpl
async def verify(state: Hidden, transcript: Transcript):
    return Told(reward=float(transcript.text() == str(state.secret) and state.tries < 2), tries=state.tries)
"""
"""Source of an environment with a secret, derived from the seed, that can be read once."""

ROW = {"responses_create_params": {"input": "guess"}, "_ng_task_index": 3}
OTHER = {"responses_create_params": {"input": "guess"}, "gymsdk": {"seed": 1}}


@pytest.fixture
def hidden_environment(made):
    return Environment("hidden", made("import random\n" + SECRET, "hidden_env"), {})


@pytest.fixture
async def client(resources_client, hidden_environment):
    async with resources_client(hidden_environment) as client:
        yield client


@pytest.fixture
async def agent(client):
    """Return an agent with an open session."""
    agent = Agent(client)
    await agent.post("/seed_session", ROW)
    return agent


class Agent:
    """An agent that keeps the last answer's cookies and asks no questions."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client
        self._cookie: dict[str, str] = {}
        self.items: list[Item] = []

    async def post(self, path: str, body: object) -> httpx.Response:
        self._client.cookies.clear()
        answer = await self._client.post(path, json=body, headers=self._cookie)
        self._cookie = {"cookie": answer.headers["set-cookie"].split(";")[0]}
        return answer

    async def call(self, name: str, arguments: dict[str, object]) -> httpx.Response:
        answer = await self.post(f"/{name}", arguments)
        number = f"c{len(self.items)}"
        self.items += [
            responses.build_function_call(name, arguments, number),
            responses.build_function_call_output(number, answer.text),
        ]
        return answer

    async def verify(self, reply: str, row: Item = ROW) -> Item:
        response = {"output": [*self.items, responses.build_message(reply)]}
        return (await self.post("/verify", {**row, "response": response})).json()


async def test_a_policy_cannot_choose_its_seed(agent):
    known = str(random.Random(1).randrange(10**6))
    honest = (await agent.call("peek", {})).text
    await agent.call("seed_session", OTHER)
    await agent.call("peek", {})
    verdict = await agent.verify(known)
    assert (verdict["reward"], verdict["tries"]) == (0.0, 1)
    assert "The earlier session was judged" in verdict["gymsdk"]["session_unused"]
    assert honest != known


@pytest.mark.parametrize(
    ("endpoint", "then", "body"),
    [
        ("seed_session", "peek", {}),
        ("reset", "peek", {}),
        ("reset", "step", {"response": {"output": [responses.build_function_call("peek", {})] * 9}}),
    ],
)
async def test_a_policy_cannot_restart_its_episode(agent, endpoint, then, body):
    secret = (await agent.call("peek", {})).text
    await agent.call("peek", {})
    assert (await agent.call(endpoint, ROW)).status_code == 200
    assert (await agent.call(then, body)).status_code == (409 if (endpoint, then) == ("reset", "peek") else 200)
    verdict = await agent.verify(secret)
    assert (verdict["reward"], verdict["tries"]) == (0.0, 2), "the number of tries is kept"


async def test_a_policy_cannot_restart_its_episode_through_another_path(agent):
    """The newer session receives as many tool calls as the response contains, one of them at a prefixed path."""
    secret = (await agent.call("peek", {})).text
    await agent.call("seed_session", ROW)
    assert (await agent.call("ng-rollout/r/peek", {})).status_code == 200
    await agent.call("peek", {})
    verdict = await agent.verify(secret)
    assert verdict["tries"] == 1, "the session that the agent opened is judged"


async def test_a_policy_that_closes_its_session_is_judged_in_it(agent):
    secret = (await agent.call("peek", {})).text
    await agent.call("peek", {})
    await agent.call("close_session", {})
    late = await agent.call("peek", {})
    verdict = await agent.verify(secret)
    assert (late.status_code, verdict["reward"], verdict["tries"]) == (409, 0.0, 2)


async def test_a_policy_that_reads_its_reward_has_been_judged(agent):
    secret = (await agent.call("peek", {})).text
    await agent.call("verify", {**ROW, "response": {"output": [responses.build_message("0")]}})
    called = await agent.call("peek", {})
    judged = await agent.verify(secret)
    assert (called.status_code, judged["kind"], "reward" in judged) == (409, "session_judged", False)


async def test_a_lost_session_is_reported_if_the_verdict_needs_it(resources_client, hidden_environment, made):
    plain = Environment(
        "hidden", made("@hookimpl\nasync def verify(task):\n    return Verdict(reward=1.0)", "plain"), {}
    )
    async with resources_client(hidden_environment) as client:
        agent = Agent(client)
        await agent.post("/seed_session", ROW)
        await agent.call("peek", {})
    for environment, kind in ((hidden_environment, "session_lost"), (plain, None)):
        async with resources_client(environment) as client:
            agent._client = client
            assert (await agent.verify("0")).get("kind") == kind
    async with resources_client(hidden_environment) as client:
        agent._client = client
        await agent.call("peek", {})
        assert (await agent.verify("0"))["kind"] == "session_lost", "an answer in between does not hide it"
        await agent.post("/seed_session", ROW)
        agent.items.clear()
        secret = (await agent.call("peek", {})).text
        assert secret.isdecimal()
        assert "reward" in await agent.verify(secret)
