"""The environment server of NeMo Gym 0.7, called as NeMo Gym's command line calls it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

import gymsdk
from gymsdk import Environment, Episode, Task
from gymsdk.models.scripted import ScriptedModel
from gymsdk.servers import environment as server
from gymsdk.types import Item

from .app_helpers import app_client

ROW = Task.ask("add", initial_count=1, expected_count=3).row()
ADD = [("increment_counter", {"count": 2})]
PARAMS = {"input": [{"role": "user", "content": "add"}]}
DATA = {"initial_count": 1, "expected_count": 3}
IDS = {"episode_id": {"rollout_id": "r1", "attempt": 2}, "task_id": {"taskset": "counter:train", "task_id": "7"}}


def episode(task_input: Item | None = None, **changed: object) -> Item:
    task_input = {"responses_create_params": PARAMS, "task_data": DATA} if task_input is None else task_input
    return {"episode_id": IDS["episode_id"], "task": {"task_id": IDS["task_id"], "task_input": task_input}} | changed


async def test_a_flat_row_returns_its_line(
    counter: Callable[..., Environment], policy: Callable[..., ScriptedModel]
) -> None:
    async with app_client(server.create_app(counter(), policy(ADD, "done"))) as client:
        line = (await client.post("/run", json=ROW | {"_ng_task_index": 3})).json()
    assert (line["reward"], line["_ng_task_index"], line["mask_sample"]) == (1.5, 3, False)


@pytest.mark.parametrize(
    "task_input",
    [{"responses_create_params": PARAMS, "task_data": DATA}, {"responses_create_params": PARAMS, **DATA}],
)
async def test_an_episode_returns_its_result_under_its_ids(
    counter: Callable[..., Environment], policy: Callable[..., ScriptedModel], task_input: Item
) -> None:
    async with app_client(server.create_app(counter(), policy(ADD, "done"))) as client:
        response = (await client.post("/run", json=episode(task_input))).json()
    assert response.keys() == {"episode_id", "task_id", "result"}
    assert {key: response[key] for key in IDS} == IDS
    assert (response["result"]["reward"], response["result"]["final"]) == (1.5, 3)
    assert not [key for key in response["result"] if key.startswith("_ng_")]


@pytest.mark.parametrize(
    ("settings", "turns", "stage", "kind", "terminal"),
    [
        ({"judge": "down"}, ["done"], "verification", "judge_failed", False),
        ({"judge": "lost"}, ["done"], "verification", "judge_failed", True),
        ({}, [[("stumble", {})]], "agent", "gymsdk:tool_raised", False),
    ],
)
async def test_an_episode_without_a_reward_is_a_failure_with_status_200(
    counter: Callable[..., Environment],
    policy: Callable[..., ScriptedModel],
    settings: Item,
    turns: list[object],
    stage: str,
    kind: str,
    terminal: bool,
) -> None:
    async with app_client(server.create_app(counter(**settings), policy(*turns))) as client:
        answer = await client.post("/run", json=episode())
    failure = answer.json()["failure"]
    assert answer.status_code == 200
    assert answer.json().keys() == {"episode_id", "task_id", "failure"}
    assert (failure["stage"], failure["failure_kind"], failure["terminal"]) == (stage, kind, terminal)
    assert failure["failure_reason"]
    assert failure["partial_response"]["object"] == "response"


FLAT = ROW | {"_ng_task_index": 3, "_ng_rollout_index": 0, "agent_ref": {"name": "counter_simple_agent"}}


@pytest.mark.parametrize(
    ("settings", "turns", "row", "kind", "stage", "terminal"),
    [
        ({"judge": "down"}, ["done"], FLAT, "judge_failed", "verification", False),
        ({"judge": "lost"}, ["done"], FLAT, "judge_failed", "verification", True),
        ({}, [[("stumble", {})]], FLAT, "environment_server_failed", "agent", False),
        ({}, ["done"], FLAT | {"initial_count": "many"}, "environment_server_failed", "seed", True),
        ({}, ["done"], FLAT | {"_ng_rollout_id": "r 1"}, "environment_server_failed", "seed", True),
    ],
)
async def test_a_flat_row_without_a_reward_is_a_failure_with_status_200(
    counter: Callable[..., Environment],
    policy: Callable[..., ScriptedModel],
    settings: Item,
    turns: list[object],
    row: Item,
    kind: str,
    stage: str,
    terminal: bool,
) -> None:
    async with app_client(server.create_app(counter(**settings), policy(*turns))) as client:
        answer = await client.post("/run", json=row)
    failure = answer.json()
    assert answer.status_code == 200
    assert failure.keys().isdisjoint({"reward", "reward_components", "response"})
    assert (failure["_ng_failure_class"], failure["_ng_failure_stage"]) == (kind, stage)
    assert (failure["_ng_failure_terminal"], failure["agent_ref"]) == (terminal, FLAT["agent_ref"])
    assert failure["_ng_failure_message"]
    assert ("_ng_failure_partial_response" in failure) == (stage != "seed")


async def test_a_flat_row_at_a_full_server_is_a_retryable_failure(
    counter: Callable[..., Environment], policy: Callable[..., ScriptedModel]
) -> None:
    async with app_client(server.create_app(counter(), policy("done"), concurrency=0, queue=0)) as client:
        failure = (await client.post("/run", json=FLAT)).json()
    assert (failure["_ng_failure_stage"], failure["_ng_failure_terminal"]) == ("admission", False)


@pytest.mark.parametrize(
    "task_input",
    [
        {},
        {"responses_create_params": PARAMS, "task_data": {"initial_count": "many"}},
        {"responses_create_params": PARAMS, "task_data": DATA, "initial_count": 5},
        {"responses_create_params": PARAMS, "task_data": DATA, "gymsdk": {"budget": {"turns": -1}}},
    ],
)
async def test_a_task_that_does_not_fit_is_a_terminal_failure(
    counter: Callable[..., Environment], policy: Callable[..., ScriptedModel], task_input: Item
) -> None:
    async with app_client(server.create_app(counter(), policy("done"))) as client:
        answer = await client.post("/run", json=episode(task_input))
    failure = answer.json()["failure"]
    assert answer.status_code == 200
    assert (failure["stage"], failure["terminal"]) == ("seed", True)


async def test_a_failure_reason_has_at_most_2000_characters(
    counter: Callable[..., Environment], policy: Callable[..., ScriptedModel]
) -> None:
    async with app_client(server.create_app(counter(judge="x" * 5000), policy("done"))) as client:
        answer = await client.post("/run", json=episode())
    assert len(answer.json()["failure"]["failure_reason"]) == 2000


@pytest.mark.parametrize(
    "body",
    [
        episode(episode_id={"rollout_id": "r 1"}),
        episode(episode_id={"rollout_id": "r1", "attempt": -1}),
        episode(strange=1),
        {"episode_id": 3},
        {"task": {}},
    ],
)
async def test_a_request_with_invalid_ids_gets_422(
    counter: Callable[..., Environment], policy: Callable[..., ScriptedModel], body: Item
) -> None:
    async with app_client(server.create_app(counter(), policy("done"))) as client:
        answer = await client.post("/run", json=body)
    assert answer.status_code == 422


async def test_an_id_with_an_attempt_suffix_is_rejected(
    counter: Callable[..., Environment], policy: Callable[..., ScriptedModel]
) -> None:
    async with app_client(server.create_app(counter(), policy("done"))) as client:
        answer = await client.post("/run", json=episode(episode_id={"rollout_id": "r1-a2"}))
    assert "must not end in `-a` and a number" in answer.json()["failure"]["failure_reason"]


async def test_an_episode_requested_twice_is_played_once_unless_it_failed(
    counter: Callable[..., Environment], policy: Callable[..., ScriptedModel]
) -> None:
    async with app_client(server.create_app(counter(), policy([("stumble", {})], "done"))) as client:
        failed, played, again = [(await client.post("/run", json=episode())).json() for _ in range(3)]
    assert "failure" in failed
    assert "result" in played
    assert played == again


async def test_an_episode_at_a_full_server_is_a_retryable_failure(
    counter: Callable[..., Environment], policy: Callable[..., ScriptedModel]
) -> None:
    async with app_client(server.create_app(counter(), policy("done"), concurrency=0, queue=0)) as client:
        failure = (await client.post("/run", json=episode())).json()["failure"]
    assert (failure["stage"], failure["terminal"]) == ("admission", False)


class SleepingModel:
    """A model that takes longer than any timeout."""

    async def respond(self, request: Item, *, episode: Episode | None = None) -> Item:
        await asyncio.sleep(60)
        return {}


async def test_an_agents_timeout_limits_the_episode(counter: Callable[..., Environment]) -> None:
    task_input = {"responses_create_params": PARAMS, "task_data": DATA, "agent_timeout_seconds": 0.2}
    async with app_client(server.create_app(counter(), SleepingModel())) as client:
        failure = (await client.post("/run", json=episode(task_input))).json()["failure"]
    assert (failure["failure_kind"], failure["stage"], failure["terminal"]) == ("gymsdk:model_timeout", "agent", False)


async def test_aggregate_metrics_returns_the_metrics_of_rows(
    counter: Callable[..., Environment], policy: Callable[..., ScriptedModel]
) -> None:
    async with app_client(server.create_app(counter(), policy("done"))) as client:
        body = (await client.post("/aggregate_metrics", json={"verify_responses": [{"reward": 1.0}]})).json()
    assert body["agent_metrics"]["mean/reward"] == 1.0


async def test_repeats_of_a_materialised_row_differ_by_the_index_in_their_rollout_id(
    installed: Callable[..., object],
) -> None:
    installed()
    sums = gymsdk.load("sums")
    row = next(sums.tasks("train")).row()
    ids = {"task_id": {"taskset": "sums:train", "task_id": "7"}}

    async def rewards(bodies: list[Item]) -> list[float]:
        answers = [(await client.post("/run", json=body)).json() for body in bodies]
        return [answer.get("result", answer)["reward"] for answer in answers]

    async with app_client(server.create_app(sums, gymsdk.model("scripted/oracle:0.5"))) as client:
        materialised = await rewards(
            [{"episode_id": {"rollout_id": f"7-{repeat}"}, "task": {**ids, "task_input": row}} for repeat in range(12)]
        )
        flat = await rewards([{**row, "_ng_rollout_index": repeat} for repeat in range(12)])
    assert materialised == flat
    assert set(materialised) == {0.0, 1.0}
