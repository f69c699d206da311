"""Episodes played turn by turn: `/reset`, `/step`, `/close`."""

from __future__ import annotations

from gymsdk import responses

ROW = {"responses_create_params": {"input": "add 3"}, "initial_count": 3, "expected_count": 6}


def turn(*items, **more):
    return {**ROW, "response": {"output": list(items)}, **more}


ADD = responses.build_function_call("increment_counter", {"count": 3}, "c1")


async def test_an_episode_is_played_turn_by_turn(client):
    alone = await client.post("/step", json=turn(ADD))
    assert (alone.status_code, "POST a row to /reset first" in alone.json()["detail"]) == (409, True)
    assert (await client.post("/close", json={})).status_code == 200
    opened = (await client.post("/reset", json=ROW)).json()
    first = (await client.post("/step", json=turn(ADD))).json()
    last = (await client.post("/step", json=turn(responses.build_message("done")))).json()
    late = await client.post("/step", json=turn(responses.build_message("more")))
    closed = await client.post("/close", json={})
    assert opened["observation"].startswith("seed ")
    assert opened["info"]["supports_explicit_close"] is opened["info"]["supports_step_idempotency"] is True
    assert first["info"] == {"tool_outputs": [{"call_id": "c1", "output": '{"success":true}'}]}
    keys = ("observation", "reward", "terminated", "truncated")
    assert {key: first[key] for key in first if key != "info"} == dict(
        zip(keys, (None, 0.0, False, False), strict=True)
    )
    assert (last["reward"], last["terminated"], last["truncated"]) == (1.5, True, False)
    assert (last["info"]["final"], last["info"]["reward_components"]) == (6, {"verdict": 1.0, "steps": 0.5})
    assert (late.status_code, late.json()["detail"]) == (409, "the episode is over: POST /reset to start another")
    assert (closed.status_code, closed.json()) == (200, {})


async def test_a_repeated_step_is_played_once(client):
    async def step(call, **more):
        return await client.post("/step", json=turn(call, **more))

    read = responses.build_function_call("get_counter_value", {}, "c2")
    stumble = responses.build_function_call("stumble", {}, "c1")
    await client.post("/reset", json=ROW)
    answers = [await step(ADD, _ng_step_request_id="a") for _ in range(2)]
    assert answers[0].json() == answers[1].json()
    count = (await step(read, _ng_step_request_id="b")).json()
    assert count["info"]["tool_outputs"][0]["output"] == '{"count":6}'
    # A step without an id is played each time.
    for _ in range(2):
        await step(ADD)
    assert (await step(read)).json()["info"]["tool_outputs"][0]["output"] == '{"count":12}'
    # A failed turn is not played again.
    failed = [await step(stumble, _ng_step_request_id="d") for _ in range(2)]
    assert [(answer.status_code, answer.json()["kind"]) for answer in failed] == [(503, "tool_raised")] * 2
    assert (await step(read)).json()["info"]["tool_outputs"][0]["output"] == '{"count":112}'
    ends = [await step(responses.build_message("x"), _ng_step_request_id="c") for _ in range(2)]
    assert ends[0].json() == ends[1].json()
    # A tool named like an endpoint can be called in a turn.
    await client.post("/reset", json=ROW)
    answer = (await step(responses.build_function_call("verify", {}, "c1"))).json()
    assert answer["info"]["tool_outputs"] == [{"call_id": "c1", "output": "a tool"}]


async def test_a_failed_verdict_is_requested_again(resources_client, counter):
    environment = counter(judge="down")
    async with resources_client(environment) as client:
        await client.post("/reset", json=ROW)
        failed = await client.post("/step", json=turn(responses.build_message("x"), _ng_step_request_id="a"))
        environment.config = environment.config.model_copy(update={"judge": "up"})
        again = await client.post("/step", json=turn(responses.build_message("x"), _ng_step_request_id="a"))
    assert (failed.status_code, "reward" in failed.json()) == (503, False)
    assert (again.json()["reward"], again.json()["info"]["replies"]) == (0.5, 1)


async def test_a_truncated_turn_or_a_budget_of_turns_truncates_the_episode_which_is_judged(client):
    truncated = turn(responses.build_message("I"))
    truncated["response"]["incomplete_details"] = {"reason": "max_output_tokens"}
    for change, body, ended in (
        ({"initial_count": 6}, truncated, "tokens"),
        ({"gymsdk": {"budget": {"turns": 1}}}, turn(ADD), "turns"),
    ):
        await client.post("/reset", json={**ROW, **change})
        answer = (await client.post("/step", json=body)).json()
        found = (answer["reward"], answer["terminated"], answer["truncated"], answer["info"]["ended"])
        assert found == (1.0, False, True, ended)


async def test_a_session_is_not_played_through_the_other_endpoints_nor_by_an_invalid_step(client):
    for opened, path in (("/seed_session", "/step"), ("/reset", "/spell")):
        await client.post(opened, json=ROW)
        answer = await client.post(path, json=turn(ADD))
        assert answer.status_code == 409
        assert answer.json()["detail"].startswith(f"this session was opened by {opened}")
    for change in ({"response": None}, {"_ng_step_request_id": 1}):
        assert (await client.post("/step", json={**turn(ADD), **change})).status_code == 422


async def test_an_episode_left_by_its_client_can_still_be_verified(client):
    await client.post("/reset", json=ROW)
    await client.post("/step", json=turn(ADD))
    output = [ADD, responses.build_function_call_output("c1", '{"success":true}')]
    answer = (await client.post("/verify", json=turn(*output))).json()
    assert (answer["reward"], answer["final"]) == (1.0, 6)
