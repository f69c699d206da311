"""The environment server of NeMo Gym 0.7, called as NeMo Gym's command line calls it."""

from __future__ import annotations

from typing import Any

import gymsdk
from gymsdk import Environment, Model, Task
from gymsdk.servers import environment as server
from gymsdk.types import Item

from .app_helpers import app_client
from .engines import SlowModel

ROW = Task.ask("add", initial_count=1, expected_count=3).row()
ADD = [("increment_counter", {"count": 2})]
PARAMS = {"input": [{"role": "user", "content": "add"}]}
DATA = {"initial_count": 1, "expected_count": 3}
IDS = {"episode_id": {"rollout_id": "r1", "attempt": 2}, "task_id": {"taskset": "counter:train", "task_id": "7"}}


STUMBLE = [("stumble", {})]


def episode(task_input: Item | None = None, **changed: object) -> Item:
    task_input = {"responses_create_params": PARAMS, "task_data": DATA} if task_input is None else task_input
    return {"episode_id": IDS["episode_id"], "task": {"task_id": IDS["task_id"], "task_input": task_input}} | changed


async def run(environment: Environment, policy: Model, body: Item, **options: Any) -> Item:
    """Return the answer to a request, which has the status 200."""
    async with app_client(server.create_app(environment, policy, **options)) as client:
        answer = await client.post("/run", json=body)
    assert answer.status_code == 200
    return answer.json()


async def test_a_flat_row_returns_its_line_and_an_episode_its_result_under_its_ids(counter, policy):
    line = await run(counter(), policy(ADD, "done"), ROW | {"_ng_task_index": 3})
    assert (line["reward"], line["_ng_task_index"], line["mask_sample"]) == (1.5, 3, False)
    for task_input in (None, {"responses_create_params": PARAMS, **DATA}):
        response = await run(counter(), policy(ADD, "done"), episode(task_input))
        assert response.keys() == {"episode_id", "task_id", "result"}
        assert {key: response[key] for key in IDS} == IDS
        assert (response["result"]["reward"], response["result"]["final"]) == (1.5, 3)
        assert not [key for key in response["result"] if key.startswith("_ng_")]


async def test_an_episode_without_a_reward_is_a_failure_with_status_200(counter, policy):
    for settings, turn, stage, kind, terminal in (
        ({"judge": "down"}, "done", "verification", "judge_failed", False),
        ({"judge": "x" * 5000}, "done", "verification", "judge_failed", True),
        ({}, STUMBLE, "agent", "gymsdk:tool_raised", False),
    ):
        answer = await run(counter(**settings), policy(turn), episode())
        failure = answer["failure"]
        assert answer.keys() == {"episode_id", "task_id", "failure"}
        assert (failure["stage"], failure["failure_kind"], failure["terminal"]) == (stage, kind, terminal)
        assert 0 < len(failure["failure_reason"]) <= 2000
        assert (len(failure["failure_reason"]) == 2000) == (len(settings.get("judge", "")) == 5000)
        assert failure["partial_response"]["object"] == "response"
    suffixed = episode(episode_id={"rollout_id": "r1-a2"})
    failure = (await run(counter(), policy("done"), suffixed))["failure"]
    assert "must not end in `-a` and a number" in failure["failure_reason"]
    full = {"concurrency": 0, "queue": 0}
    failure = (await run(counter(), policy("done"), episode(), **full))["failure"]
    assert (failure["stage"], failure["terminal"]) == ("admission", False)
    failure = await run(counter(), policy("done"), FLAT, **full)
    assert (failure["_ng_failure_stage"], failure["_ng_failure_terminal"]) == ("admission", False)


FLAT = ROW | {"_ng_task_index": 3, "_ng_rollout_index": 0, "agent_ref": {"name": "counter_simple_agent"}}


async def test_a_flat_row_without_a_reward_is_a_failure_with_status_200(counter, policy):
    for settings, turn, change, kind, stage, terminal in (
        ({"judge": "down"}, "done", {}, "judge_failed", "verification", False),
        ({"judge": "lost"}, "done", {}, "judge_failed", "verification", True),
        ({}, STUMBLE, {}, "environment_server_failed", "agent", False),
        ({}, "done", {"initial_count": "many"}, "environment_server_failed", "seed", True),
        ({}, "done", {"_ng_rollout_id": "r 1"}, "environment_server_failed", "seed", True),
    ):
        failure = await run(counter(**settings), policy(turn), FLAT | change)
        assert failure.keys().isdisjoint({"reward", "reward_components", "response"})
        assert (failure["_ng_failure_class"], failure["_ng_failure_stage"]) == (kind, stage)
        assert (failure["_ng_failure_terminal"], failure["agent_ref"]) == (terminal, FLAT["agent_ref"])
        assert failure["_ng_failure_message"]
        assert ("_ng_failure_partial_response" in failure) == (stage != "seed")


async def test_a_task_that_does_not_fit_is_a_terminal_failure_and_invalid_ids_get_422(counter, policy):
    fitting = {"responses_create_params": PARAMS, "task_data": DATA}
    for task_input in (
        {},
        fitting | {"task_data": {"initial_count": "many"}},
        fitting | {"initial_count": 5},
        fitting | {"gymsdk": {"budget": {"turns": -1}}},
    ):
        failure = (await run(counter(), policy("done"), episode(task_input)))["failure"]
        assert (failure["stage"], failure["terminal"]) == ("seed", True), task_input
    async with app_client(server.create_app(counter(), policy("done"))) as client:
        for body in (
            episode(episode_id={"rollout_id": "r 1"}),
            episode(episode_id={"rollout_id": "r1", "attempt": -1}),
            episode(strange=1),
            {"episode_id": 3},
            {"task": {}},
        ):
            assert (await client.post("/run", json=body)).status_code == 422, body
        rows = {"verify_responses": [{"reward": 1.0}]}
        metrics = (await client.post("/aggregate_metrics", json=rows)).json()
    assert metrics["agent_metrics"]["mean/reward"] == 1.0


async def test_an_episode_requested_twice_is_played_once_unless_it_failed(counter, policy):
    async with app_client(server.create_app(counter(), policy([("stumble", {})], "done"))) as client:
        failed, played, again = [(await client.post("/run", json=episode())).json() for _ in range(3)]
    assert "failure" in failed
    assert "result" in played
    assert played == again


async def test_an_agents_timeout_limits_the_episode(counter):
    task_input = {"responses_create_params": PARAMS, "task_data": DATA, "agent_timeout_seconds": 0.2}
    failure = (await run(counter(), SlowModel(), episode(task_input)))["failure"]
    assert (failure["failure_kind"], failure["stage"], failure["terminal"]) == ("gymsdk:model_timeout", "agent", False)


async def test_repeats_of_a_materialised_row_differ_by_the_index_in_their_rollout_id(installed):
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
