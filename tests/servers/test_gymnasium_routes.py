"""Episodes played turn by turn: `/reset`, `/step`, `/close`."""

from __future__ import annotations

import pytest

from gymsdk import responses

ROW = {"responses_create_params": {"input": "add 3"}, "initial_count": 3, "expected_count": 6}


def turn(*items, **more):
    return {**ROW, "response": {"output": list(items)}, **more}


ADD = responses.build_function_call("increment_counter", {"count": 3}, "c1")


async def test_an_episode_is_played_turn_by_turn(resources_client):
    async with resources_client() as client:
        opened = (await client.post("/reset", json=ROW)).json()
        first = (await client.post("/step", json=turn(ADD))).json()
        last = (await client.post("/step", json=turn(responses.build_message("done")))).json()
        closed = await client.post("/close", json={})
    assert opened["observation"].startswith("seed ")
    assert opened["info"]["supports_explicit_close"] is opened["info"]["supports_step_idempotency"] is True
    assert first == {
        "observation": None,
        "reward": 0.0,
        "terminated": False,
        "truncated": False,
        "info": {"tool_outputs": [{"call_id": "c1", "output": '{"success":true}'}]},
    }
    assert (last["reward"], last["terminated"], last["truncated"]) == (1.5, True, False)
    assert (last["info"]["final"], last["info"]["reward_components"]) == (6, {"verdict": 1.0, "steps": 0.5})
    assert (closed.status_code, closed.json()) == (200, {})


async def test_a_repeated_step_is_played_once(resources_client):
    async with resources_client() as client:
        await client.post("/reset", json=ROW)
        answers = [await client.post("/step", json=turn(ADD, _ng_step_request_id="a")) for _ in range(2)]
        read = responses.build_function_call("get_counter_value", {}, "c2")
        count = (await client.post("/step", json=turn(read, _ng_step_request_id="b"))).json()
        ends = [
            await client.post("/step", json=turn(responses.build_message("x"), _ng_step_request_id="c"))
            for _ in range(2)
        ]
    assert answers[0].json() == answers[1].json()
    assert count["info"]["tool_outputs"][0]["output"] == '{"count":6}'
    assert ends[0].json() == ends[1].json()


async def test_a_step_without_an_id_is_played_each_time(resources_client):
    async with resources_client() as client:
        await client.post("/reset", json=ROW)
        for _ in range(2):
            await client.post("/step", json=turn(ADD))
        read = responses.build_function_call("get_counter_value", {}, "c2")
        count = (await client.post("/step", json=turn(read))).json()
    assert count["info"]["tool_outputs"][0]["output"] == '{"count":9}'


async def test_a_failed_turn_is_not_played_again(resources_client):
    stumble = responses.build_function_call("stumble", {}, "c1")
    async with resources_client() as client:
        await client.post("/reset", json=ROW)
        failed = [await client.post("/step", json=turn(stumble, _ng_step_request_id="a")) for _ in range(2)]
        read = responses.build_function_call("get_counter_value", {}, "c2")
        count = (await client.post("/step", json=turn(read))).json()
    assert [(answer.status_code, answer.json()["kind"]) for answer in failed] == [(503, "tool_raised")] * 2
    assert count["info"]["tool_outputs"][0]["output"] == '{"count":103}'


async def test_a_failed_verdict_is_requested_again(resources_client, counter):
    environment = counter(judge="down")
    async with resources_client(environment) as client:
        await client.post("/reset", json=ROW)
        failed = await client.post("/step", json=turn(responses.build_message("x"), _ng_step_request_id="a"))
        environment.config = environment.config.model_copy(update={"judge": "up"})
        again = await client.post("/step", json=turn(responses.build_message("x"), _ng_step_request_id="a"))
    assert (failed.status_code, "reward" in failed.json()) == (503, False)
    assert (again.json()["reward"], again.json()["info"]["replies"]) == (0.5, 1)


async def test_a_step_after_the_end_is_rejected(resources_client):
    async with resources_client() as client:
        await client.post("/reset", json=ROW)
        await client.post("/step", json=turn(responses.build_message("done")))
        answer = await client.post("/step", json=turn(responses.build_message("more")))
    assert (answer.status_code, answer.json()["detail"]) == (409, "the episode is over: POST /reset to start another")


async def test_a_truncated_turn_truncates_the_episode_and_is_judged(resources_client):
    truncated = {
        **ROW,
        "response": {"output": [responses.build_message("I")], "incomplete_details": {"reason": "max_output_tokens"}},
    }
    async with resources_client() as client:
        await client.post("/reset", json={**ROW, "initial_count": 6})
        answer = (await client.post("/step", json=truncated)).json()
    assert (answer["reward"], answer["terminated"], answer["truncated"], answer["info"]["ended"]) == (
        1.0,
        False,
        True,
        "tokens",
    )


async def test_a_budget_of_turns_truncates_the_episode(resources_client):
    async with resources_client() as client:
        await client.post("/reset", json={**ROW, "gymsdk": {"budget": {"turns": 1}}})
        answer = (await client.post("/step", json=turn(ADD))).json()
    assert (answer["truncated"], answer["reward"], answer["info"]["ended"]) == (True, 1.0, "turns")


@pytest.mark.parametrize("path", ["/step", "/spell"])
async def test_a_session_is_not_played_through_the_other_endpoints(resources_client, path):
    opened = {"/step": "/seed_session", "/spell": "/reset"}[path]
    async with resources_client() as client:
        await client.post(opened, json=ROW)
        answer = await client.post(path, json=turn(ADD))
    assert (answer.status_code, answer.json()["detail"].startswith(f"this session was opened by {opened}")) == (
        409,
        True,
    )


async def test_a_step_without_a_session_is_rejected(resources_client):
    async with resources_client() as client:
        answer = await client.post("/step", json=turn(ADD))
        closed = await client.post("/close", json={})
    assert (answer.status_code, "POST a row to /reset first" in answer.json()["detail"]) == (409, True)
    assert closed.status_code == 200


async def test_an_episode_left_by_its_client_can_still_be_verified(resources_client):
    async with resources_client() as client:
        await client.post("/reset", json=ROW)
        await client.post("/step", json=turn(ADD))
        output = [ADD, responses.build_function_call_output("c1", '{"success":true}')]
        answer = (await client.post("/verify", json=turn(*output))).json()
    assert (answer["reward"], answer["final"]) == (1.0, 6)


async def test_a_tool_named_like_an_endpoint_can_be_called_in_a_turn(resources_client):
    async with resources_client() as client:
        await client.post("/reset", json=ROW)
        answer = (await client.post("/step", json=turn(responses.build_function_call("verify", {}, "c1")))).json()
    assert answer["info"]["tool_outputs"] == [{"call_id": "c1", "output": "a tool"}]


@pytest.mark.parametrize("change", [{"response": None}, {"_ng_step_request_id": 1}])
async def test_an_invalid_step_is_rejected(resources_client, change):
    async with resources_client() as client:
        await client.post("/reset", json=ROW)
        assert (await client.post("/step", json={**turn(ADD), **change})).status_code == 422
