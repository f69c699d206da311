"""A resources server: rows seeded, tools called, responses verified, bad requests rejected."""

from __future__ import annotations

import asyncio
import gc
import logging
import random

import httpx
import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gymsdk import Environment, responses
from gymsdk.servers import aggregates, resources
from gymsdk.types import Budget, Episode

from .nodes import metric

INPUT = [{"role": "user", "content": "add 3"}]
ROW = {"responses_create_params": {"input": INPUT}, "initial_count": 3, "expected_count": 6}
DONE = responses.build_message("done", id="m")
ADDED = [
    responses.build_function_call("increment_counter", {"count": 3}, "c1", id="f"),
    responses.build_function_call_output("c1", '{"success":true}'),
]
MINIMAL = {
    "id": "resp",
    "created_at": 0,
    "model": "m",
    "object": "response",
    "output": [DONE],
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
}
EPISODE = {"rollout_id": "r1", "attempt": 0}
TYPED = {
    "resources_session_id": "s1",
    "episode_id": EPISODE,
    "task_id": {"taskset": "t", "task_id": "1"},
    "task_data": {"initial_count": 3, "expected_count": 6},
}


def build_verify_request(*items, row=ROW):
    return {**row, "response": {**MINIMAL, "output": [*items, DONE]}}


async def test_a_row_is_seeded_called_and_verified(resources_client):
    async with resources_client() as client:
        assert (await client.post("/seed_session", json=ROW)).json() == {}
        called = await client.post("/increment_counter", json={"count": 3})
        assert (called.status_code, called.text) == (200, '{"success":true}')
        answer = (await client.post("/verify", json=build_verify_request(*ADDED))).json()
    assert (answer["reward"], answer["final"], answer["replies"]) == (1.5, 6, 1)
    assert answer["reward_components"] == {"verdict": 1.0, "steps": 0.5}
    assert (answer["mask_sample"], answer["failure_kind"], answer["failure_reason"]) == (False, None, None)


async def test_verify_echoes_its_input(resources_client):
    async with resources_client() as client:
        body = build_verify_request() | {
            "more": [1],
            "_ng_task_index": 4,
            "_ng_rollout_id": "a-1",
            "gymsdk": {"seed": 5},
        }
        answer = (await client.post("/verify", json=body)).json()
    assert answer["response"] == body["response"]
    assert answer["responses_create_params"] == ROW["responses_create_params"]
    assert (answer["more"], answer["_ng_task_index"], answer["initial_count"]) == ([1], 4, 3)
    assert "_ng_rollout_id" not in answer
    assert answer["gymsdk"]["seed"] == 5
    assert answer["gymsdk"]["verdict"] == ["grader_timeout", "final", "replies", "said", "opening"]


async def test_an_agent_of_gymsdk_can_ask_for_the_verdict_alone(resources_client):
    request = build_verify_request(*ADDED)
    async with resources_client() as client:
        complete = (await client.post("/verify", json=request)).json()
        verdict = (await client.post("/verify", json=request | {"gymsdk": {"echo": False}})).json()
        echoed = (await client.post("/verify", json=request | {"gymsdk": {"echo": True}})).json()
    assert verdict == {key: value for key, value in complete.items() if key not in request}
    assert verdict["reward"] == complete["reward"]
    assert echoed["response"] == request["response"]


async def test_a_response_is_verified_without_a_session(resources_client):
    async with resources_client() as client:
        answer = (await client.post("/verify", json=build_verify_request(*ADDED))).json()
    assert (answer["reward"], answer["final"], answer["replies"]) == (1.5, 6, 1)


async def test_nulls_added_by_a_table_do_not_matter(resources_client):
    nulls = {"nested": {"a": None, "b": 1}, "initial_count": 3, "expected_count": None, "other": None}
    message = {"role": "user", "content": "add 3", "type": None}
    row = {"responses_create_params": {"input": [message], "tools": None}, **nulls}
    item = {"role": "assistant", "type": None, "status": None, "content": [{"type": "output_text", "text": "done"}]}
    async with resources_client() as client:
        answer = await client.post("/verify", json={**row, "response": {**MINIMAL, "output": [item]}})
        seeded = await client.post("/seed_session", json=row)
    assert (answer.status_code, answer.json()["said"]) == (200, "done")
    assert seeded.status_code == 200


async def test_a_repeated_verdict_is_the_same(resources_client):
    async with resources_client() as client:
        await client.post("/seed_session", json=ROW)
        await client.post("/increment_counter", json={"count": 3})
        first = await client.post("/verify", json=build_verify_request(*ADDED))
        again = await client.post("/verify", json=build_verify_request(*ADDED))
        other = await client.post("/verify", json=build_verify_request(*ADDED, responses.build_message("more", id="n")))
        called = await client.post("/get_counter_value")
    assert first.json() == again.json()
    assert (other.status_code, called.status_code) == (409, 409)
    assert (other.json()["kind"], called.json()["kind"]) == ("session_judged", "session_judged")


async def test_a_judged_session_holds_no_episode(resources_client, counter):
    environment = counter()
    async with resources_client(environment) as client:
        await client.post("/seed_session", json=ROW)
        await client.post("/increment_counter", json={"count": 3})
        first = await client.post("/verify", json=build_verify_request(*ADDED))
        async with asyncio.timeout(10):
            while not environment.plugin.CLOSED:  # noqa: ASYNC110  # the session closes its episode in the background
                await asyncio.sleep(0.01)
        gc.collect()
        episodes = [each for each in gc.get_objects() if isinstance(each, Episode) and each.environment is environment]
        assert episodes == []
        again = await client.post("/verify", json=build_verify_request(*ADDED))
        called = await client.post("/get_counter_value")
        seeded = await client.post("/seed_session", json=ROW)
        figures = (await client.get("/metrics")).text
    assert (again.json(), called.json()["kind"]) == (first.json(), "session_judged")
    assert (seeded.status_code, metric(figures, "sessions_open", server="counter")) == (200, 2)
    assert environment.plugin.CLOSED == [3, 3]


async def test_a_verdict_that_failed_leaves_the_session_as_it_is(resources_client, counter):
    environment = counter(judge="down")
    async with resources_client(environment) as client:
        await client.post("/seed_session", json=ROW)
        first, again = [await client.post("/verify", json=build_verify_request()) for _ in range(2)]
        assert environment.plugin.CLOSED == []
    assert (first.status_code, first.json()) == (again.status_code, again.json())
    assert first.json().get("stage") == "verify"


async def test_a_session_of_another_row_is_ignored_by_a_stateless_verdict(resources_client, made):
    plain = made("@hookimpl\nasync def verify(task):\n    return Verdict(reward=1.0)", "plain_env")
    async with resources_client(Environment("plain", plain, {})) as client:
        await client.post("/seed_session", json=ROW)
        answer = await client.post("/verify", json=build_verify_request(row={**ROW, "initial_count": 6}))
    assert (answer.status_code, answer.json()["reward"]) == (200, 1.0)
    assert answer.json()["gymsdk"]["session_unused"].startswith("The cookie's session was not opened with this row: ")


async def test_a_truncated_turn_is_not_played(resources_client):
    truncated = build_verify_request(*ADDED)
    truncated["response"]["incomplete_details"] = {"reason": "max_output_tokens"}
    async with resources_client() as client:
        without_session = (await client.post("/verify", json=truncated)).json()
        await client.post("/seed_session", json=ROW)
        await client.post("/increment_counter", json={"count": 3})
        with_session = (await client.post("/verify", json=truncated)).json()
    assert (
        without_session["reward"],
        without_session["replies"],
        without_session["said"],
        without_session["gymsdk"]["ended"],
    ) == (1.0, 0, "done", "tokens")
    assert {**with_session, "opening": 0} == {**without_session, "opening": 0}


async def test_calls_after_the_end_are_answered_not_run(resources_client):
    async with resources_client(budget=Budget(tools=1)) as client:
        await client.post("/seed_session", json=ROW)
        await client.post("/increment_counter", json={"count": 3})
        answers = [await client.post("/increment_counter", json={"count": 3}) for _ in range(2)]
    assert [answer.json() for answer in answers] == [{"error": "not run: the episode is over"}] * 2
    assert answers[0].headers["x-gymsdk-step"] == '{"reward":0.0,"done":true}'


async def test_only_the_episodes_tools_can_be_called(resources_client):
    offered = [{"type": "function", "name": "spell", "parameters": {"type": "object", "properties": {}}}]
    row = {**ROW, "responses_create_params": {"input": INPUT, "tools": offered}}
    async with resources_client() as client:
        await client.post("/seed_session", json=row)
        assert (await client.post("/spell", json={})).text == "it is 3"
        refused = await client.post("/get_counter_value", json={})
        unknown = await client.post("/no_such_tool", json={})
    assert refused.json()["error"].startswith("There is no tool named 'get_counter_value'.")
    assert (unknown.status_code, unknown.json()) == (404, {"detail": "Not Found"})


async def test_a_tool_of_the_row_is_answered(resources_client):
    offered = [{"type": "function", "name": "rows_own", "parameters": {"type": "object", "properties": {}}}]
    row = {**ROW, "responses_create_params": {"input": INPUT, "tools": offered}}
    async with resources_client() as client:
        await client.post("/seed_session", json=row)
        answer = await client.post("/rows_own", json={})
    assert (answer.status_code, "cannot be run here" in answer.text) == (200, True)


async def test_a_tool_call_without_a_session_is_rejected(resources_client):
    async with resources_client() as client:
        answer = await client.post("/spell", json={})
    assert answer.status_code == 409
    assert answer.json()["detail"].startswith("the request has no session: POST a row to /seed_session first")


@pytest.mark.parametrize("name", ["verify", "seed_session", "aggregate_metrics", "reset", "step"])
async def test_an_endpoint_is_not_a_tool(resources_client, name):
    async with resources_client() as client:
        await client.post("/seed_session", json=ROW)
        answer = await client.post(f"/{name}", json={"count": 1})
    assert answer.status_code == 422


async def test_reserved_names_are_rejected_as_tools(resources_client):
    async with resources_client() as client:
        await client.post("/seed_session", json=ROW)
        assert [(await client.post(f"/{name}")).status_code for name in ("mcp", "docs", "livez")] == [404, 405, 405]


async def test_a_tool_named_like_an_endpoint_causes_a_warning_at_startup(resources_client, caplog):
    with caplog.at_level(logging.WARNING, "gymsdk"):
        async with resources_client() as client:
            await client.post("/seed_session", json=ROW)
            answer = await client.post("/verify", json={})
    assert "tools named like an endpoint cannot be called over HTTP: verify" in caplog.text
    assert answer.status_code == 422


async def test_a_failing_tool_leaves_the_session_usable(resources_client):
    async with resources_client() as client:
        await client.post("/seed_session", json=ROW)
        broken = await client.post("/stumble", json={})
        after = await client.post("/get_counter_value", json={})
    assert broken.status_code == 503
    assert (broken.json()["stage"], broken.json()["kind"]) == ("step", "tool_raised")
    assert after.json() == {"count": 103}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "Invalid tool call arguments"),
        ("[1]", "takes a JSON object"),
        ('{"count": "\\ud800"}', "Invalid tool call arguments"),
        ('{"count": NaN}', "Invalid tool call arguments"),
        ('{"count": null}', "count"),
        ("", "count"),
    ],
)
async def test_invalid_arguments_are_answered_as_in_process(resources_client, text, message):
    async with resources_client() as client:
        await client.post("/seed_session", json=ROW)
        answer = await client.post("/increment_counter", content=text)
    assert (answer.status_code, message in answer.json()["error"]) == (200, True)


async def test_arguments_that_are_not_text_are_rejected(resources_client):
    async with resources_client() as client:
        await client.post("/seed_session", json=ROW)
        assert (await client.post("/increment_counter", content=b"\xff")).status_code == 422


async def test_a_megabyte_is_accepted(resources_client):
    async with resources_client() as client:
        answer = await client.post("/verify", json=build_verify_request(row={**ROW, "long": "x" * 2**20}))
    assert (answer.status_code, len(answer.json()["long"])) == (200, 2**20)


async def test_half_a_surrogate_pair_is_accepted(resources_client):
    body = orjson.dumps(build_verify_request()).replace(b'"done"', b'"\\ud83d"')
    async with resources_client() as client:
        answer = await client.post("/verify", content=body)
    assert (answer.status_code, answer.json()["said"]) == (200, "\ud83d")


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", ["/seed_session", "/verify", "/close_session", "/aggregate_metrics", "/reset", "/step"]
)
@pytest.mark.parametrize("body", [b"{", b"[]", b'"x"', b"NaN", b'{"a": NaN}', b"\xff"])
async def test_a_body_that_is_not_an_object_is_rejected(resources_client, path, body):
    async with resources_client() as client:
        answer = await client.post(path, content=body)
    assert (answer.status_code, "detail" in answer.json()) == (422, True)


@pytest.mark.parametrize(
    "path", ["/seed_session", "/verify", "/close_session", "/aggregate_metrics", "/reset", "/step"]
)
@pytest.mark.parametrize("depth", [300, 1000, 100_000])
async def test_a_too_deeply_nested_body_is_rejected(resources_client, path, depth):
    deep = b'{"a":' * depth + b"1" + b"}" * depth
    body = orjson.dumps({**build_verify_request(), "deep": 1, "verify_responses": []})
    async with resources_client() as client:
        answer = await client.post(path, content=body.replace(b'"deep":1', b'"deep":' + deep))
    assert answer.status_code in ({413} if depth == 100_000 else {200, 409, 422})


@pytest.mark.parametrize(
    "response",
    [None, [], {}, {"output": None}, {"output": [1]}, {"output": [{"content": [1]}]}, {"output": [{"call_id": []}]}],
)
async def test_an_invalid_response_is_rejected(resources_client, response):
    async with resources_client() as client:
        answer = await client.post("/verify", json={**ROW, "response": response})
    assert answer.status_code == 422
    assert answer.json()["detail"].startswith("`response` must be a Response object")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"responses_create_params": None}, "the row does not fit environment 'counter'"),
        ({"initial_count": "many"}, "initial_count"),
        ({"_ng_rollout_id": "no spaces"}, "`_ng_rollout_id` must be"),
        ({"gymsdk": {"budget": {"turns": 0}}}, "the row's budget is invalid: turns"),
    ],
)
async def test_a_row_that_does_not_fit_is_rejected_with_a_message(resources_client, change, message):
    async with resources_client() as client:
        answers = [
            await client.post(path, json={**build_verify_request(), **change}) for path in ("/seed_session", "/verify")
        ]
    assert [answer.status_code for answer in answers] == [422, 422]
    assert message in answers[0].json()["detail"]
    assert message in answers[1].json()["detail"]


async def test_a_failed_judge_gives_no_reward(resources_client, counter):
    async with resources_client(counter(judge="down")) as client:
        answer = await client.post("/verify", json=build_verify_request())
    assert (answer.status_code, answer.json()["kind"]) == (503, "judge_failed")
    assert "reward" not in answer.json()


async def test_a_permanently_failed_judge_gives_503_too(resources_client, counter):
    async with resources_client(counter(judge="odd")) as client:
        await client.post("/seed_session", json=ROW)
        assert (await client.post("/verify", json=build_verify_request())).status_code == 503


async def test_the_seed_comes_from_the_client_the_task_or_the_row(resources_client):
    async def seed(client, **more):
        opened = await client.post("/seed_session", json={**ROW, **more, "gymsdk": more.get("gymsdk", {})})
        return opened.json()["gymsdk"]["seed"]

    async with resources_client() as client:
        assert await seed(client, gymsdk={"seed": 7}) == 7
        assert await seed(client, _ng_task_index=1) == await seed(client, _ng_task_index=1, expected_count=9)
        assert await seed(client) == await seed(client, agent_ref={"name": "a"}, other=None)
        assert await seed(client) != await seed(client, other=1)


async def test_our_own_clients_receive_the_opening_of_the_episode(resources_client):
    async with resources_client() as client:
        opened = (await client.post("/seed_session", json={**ROW, "gymsdk": {"seed": 7}})).json()["gymsdk"]
    assert opened["opening"] == [*INPUT, {"type": "message", "role": "user", "content": "seed 7"}]
    assert [tool["name"] for tool in opened["tools"]][:2] == ["increment_counter", "get_counter_value"]


async def test_a_path_may_be_prefixed_with_its_rollout(resources_client):
    async with resources_client() as client:
        for prefix in ("/ng-rollout/r-1", "/ng-rollout/r-1/training-token-capture"):
            assert (await client.post(f"{prefix}/seed_session", json=ROW)).status_code == 200
            assert (await client.post(f"{prefix}/spell", json={})).text == "it is 3"
            assert (await client.get(f"{prefix}/reverify_mode")).json() == "stateless"


async def test_the_typed_body_opens_a_session_that_verify_finds_by_the_flat_row(resources_client):
    async with resources_client() as client:
        seeded = await client.post("/seed_session", json=TYPED)
        assert seeded.json() == {"resources_session_id": "s1"}
        await client.post("/increment_counter", json={"count": 3})
        answer = (await client.post("/verify", json=build_verify_request(*ADDED))).json()
    assert (answer["reward"], answer["final"], answer["opening"]) == (1.5, 6, 2)


async def test_a_failed_judge_masks_the_sample_of_a_typed_session(resources_client, counter):
    async with resources_client(counter(judge="down")) as client:
        await client.post("/seed_session", json=TYPED)
        answer = await client.post("/verify", json=build_verify_request())
    assert answer.status_code == 200
    expected = {"reward": 0.0, "mask_sample": True, "failure_kind": "judge_failed", "_ng_failure_class": "judge_failed"}
    assert expected.items() <= answer.json().items()
    assert answer.json()["failure_reason"] == "the judge is down"


@pytest.mark.parametrize(
    "change", [{"episode_id": None}, {"task_data": 1}, {"extra": 1}, {"task_id": {"taskset": "t"}}]
)
async def test_an_invalid_typed_body_is_rejected_with_the_location(resources_client, change):
    async with resources_client() as client:
        answer = await client.post("/seed_session", json={**TYPED, **change})
    assert (answer.status_code, answer.json()["detail"][0]["loc"][:2]) == (422, ["body", *change])


async def test_aggregate_metrics_of_verified_rows(resources_client):
    rows = [
        {**ROW, "_ng_task_index": task, "_ng_rollout_index": repeat, "reward": float(task), "final": repeat}
        for task in (0, 1)
        for repeat in (0, 1)
    ]
    masked = {**ROW, "_ng_task_index": 0, "reward": 0.0, "mask_sample": True}
    async with resources_client() as client:
        answer = await client.post(
            "/aggregate_metrics", json={"verify_responses": [*rows, masked, {"_ng_failure_class": "x"}]}
        )
    found = answer.json()
    assert found["agent_metrics"]["mean/reward"] == 0.5
    assert found["agent_metrics"]["pass@1/accuracy"] == 50.0
    assert found["key_metrics"]["mean/final"] == 0.5
    assert [
        (group["_ng_task_index"], group["mean/reward"], group["num_rollouts"]) for group in found["group_level_metrics"]
    ] == [(0, 0.0, 2), (1, 1.0, 2)]
    assert [
        (each["_ng_rollout_index"], each["sample_count"], each["mean/reward"]) for each in found["repeat_level_metrics"]
    ] == [(0, 2, 0.5), (1, 2, 0.5)]


@pytest.mark.parametrize(
    ("change", "reward"),
    [
        ({}, 1.0),
        ({"reward": True}, 1.0),
        ({"reward": 10**30}, 1e30),
        ({"verification_skipped": True, "reward": 0.5}, 0.5),
        ({"mask_sample": True}, None),
        ({"mask_sample": True, "gymsdk": {"outcome": "scored", "verdict": ["mask_sample"]}}, None),
        ({"_ng_failure_class": "judge_failed", "reward": 0.0}, None),
        ({"gymsdk": {"outcome": "unscorable", "verdict": []}}, None),
        ({"reward": "1.0"}, None),
        ({"reward": [1.0]}, None),
        ({"reward": None}, None),
    ],
)
async def test_aggregate_metrics_count_the_rows_that_nemo_gym_counts(resources_client, change, reward):
    async with resources_client() as client:
        answer = await client.post("/aggregate_metrics", json={"verify_responses": [{**ROW, "reward": 1.0, **change}]})
    assert answer.status_code == 200
    assert answer.json()["agent_metrics"].get("mean/reward") == reward
    assert [group["_ng_task_index"] for group in answer.json()["group_level_metrics"]] == [0] * (reward is not None)


@pytest.mark.parametrize(
    "rows", [None, 1, [1], [{"reward": 1.0, "_ng_task_index": "x"}], [{"reward": 1, "_ng_rollout_index": []}]]
)
async def test_aggregate_metrics_of_invalid_rows_are_rejected(resources_client, rows):
    async with resources_client() as client:
        assert (await client.post("/aggregate_metrics", json={"verify_responses": rows})).status_code == 422


async def test_aggregate_metrics_of_many_rows_are_the_same(resources_client, monkeypatch):
    rows = [{**ROW, "_ng_task_index": number // 2, "reward": number % 2} for number in range(20)]
    async with resources_client() as client:
        few = await client.post("/aggregate_metrics", json={"verify_responses": rows})
        monkeypatch.setattr(aggregates, "THREAD_ROW_COUNT", 5)
        many = await client.post("/aggregate_metrics", json={"verify_responses": rows})
    assert many.json() == few.json()
    assert few.json()["agent_metrics"]["mean/reward"] == 0.5


async def test_a_rows_budget_is_limited_to_the_servers(resources_client):
    row = {**ROW, "gymsdk": {"budget": {"tools": 99}}}
    async with resources_client(budget=Budget(tools=1)) as client:
        await client.post("/seed_session", json=row)
        await client.post("/increment_counter", json={"count": 3})
        answers = [await client.post("/increment_counter", json={"count": 3}) for _ in range(2)]
    assert [answer.json() for answer in answers] == [{"error": "not run: the episode is over"}] * 2


@pytest.mark.parametrize("name", ["reward", "reward_components", "expected"])
async def test_a_row_keeps_its_own_fields_despite_an_earlier_verdict(resources_client, made, name):
    source = f"""
class Own(Task):
    {name}: float

@hookimpl
async def verify(task: Own):
    return Verdict(reward=task.{name} / 2)
"""
    row = {"responses_create_params": {"input": "q"}, name: 0.5, "gymsdk": {"verdict": [name]}}
    async with resources_client(Environment("own", made(source, "own_env"), {})) as client:
        seeded = await client.post("/seed_session", json=row)
        answer = await client.post("/verify", json={**row, "response": {"output": [DONE]}})
    assert (seeded.status_code, answer.json()["reward"]) == (200, 0.25)


async def test_a_body_without_a_prompt_is_not_a_row(resources_client):
    bare = {key: value for key, value in build_verify_request().items() if key != "responses_create_params"}
    async with resources_client() as client:
        answers = [await client.post(path, json=bare) for path in ("/seed_session", "/verify", "/reset")]
    assert [answer.status_code for answer in answers] == [422] * 3


async def test_aggregate_metrics_of_no_rows_are_empty(resources_client):
    async with resources_client() as client:
        answer = await client.post("/aggregate_metrics", json={"verify_responses": []})
    assert answer.json() == {
        "agent_metrics": {},
        "key_metrics": {},
        "group_level_metrics": [],
        "repeat_level_metrics": [],
    }


async def test_verified_rows_can_be_aggregated(resources_client):
    async with resources_client() as client:
        rows = [(await client.post("/verify", json=build_verify_request(*ADDED))).json() for _ in range(2)]
        found = (await client.post("/aggregate_metrics", json={"verify_responses": rows})).json()
    assert found["key_metrics"]["mean/reward"] == 1.5
    assert "mean/initial_count" not in found["agent_metrics"], "a number of the row is not a metric"
    assert "mean/mask_sample" not in found["agent_metrics"]


async def test_verified_rows_can_be_verified_again(resources_client):
    async with resources_client() as client:
        first = (await client.post("/verify", json={**build_verify_request(*ADDED), "gymsdk": {"seed": 3}})).json()
        again = (await client.post("/verify", json=first)).json()
    assert again == first


async def test_a_call_and_a_verdict_of_one_session_do_not_overlap(resources_client):
    async with resources_client() as client:
        await client.post("/seed_session", json=ROW)
        calls = [client.post("/increment_counter", json={"count": 1}) for _ in range(20)]
        verdicts = [client.post("/verify", json=build_verify_request()) for _ in range(5)]
        answers = await asyncio.gather(*calls, *verdicts)
    # The verdict includes a call that arrived before it and excludes a later one.
    counted = sum(answer.status_code == 200 for answer in answers[:20])
    assert {answer.status_code for answer in answers} <= {200, 409}
    assert {(answer.json()["replies"], answer.json()["final"]) for answer in answers[20:]} == {(1, 3 + counted)}


async def test_only_a_post_calls_a_tool(resources_client):
    async with resources_client() as client:
        got, missing = await client.get("/spell"), await client.get("/no_such_tool")
        others = [
            (await client.get("/verify")).headers["allow"],
            (await client.post("/reverify_mode")).headers["allow"],
        ]
    assert (got.status_code, got.headers["allow"]) == (405, "POST")
    assert (missing.status_code, missing.json()) == (404, {"detail": "Not Found"})
    assert others == ["POST", "GET"]


async def test_every_server_reports_its_health(resources_client):
    async with resources_client() as client:
        await client.post("/seed_session", json=ROW)
        assert [(await client.get(path)).json() for path in ("/", "/livez", "/readyz", "/healthz")] == [
            {"status": "ok"}
        ] * 4
        metrics = (await client.get("/metrics")).text
        assert (await client.get("/docs")).status_code == 200
        schema_document = (await client.get("/openapi.json")).json()
    assert metric(metrics, "sessions_open", server="counter") == 1
    assert metric(metrics, "requests_total", server="counter", route="/seed_session", status="200") == 1
    assert {"/seed_session", "/verify", "/increment_counter", "/step"} <= schema_document["paths"].keys()
    schema = schema_document["paths"]["/increment_counter"]["post"]["requestBody"]["content"]["application/json"][
        "schema"
    ]
    assert schema["required"] == ["count"]


async def test_a_bug_is_a_500_in_json_with_the_cookie(counter, made):
    app = resources.create_app(counter())

    async def broken() -> None:
        raise ZeroDivisionError

    app.router.routes.insert(0, type(app.router.routes[-1])("/broken", broken, methods=["GET"]))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://gym.test") as client:
        answer = await client.get("/broken")
    assert (answer.status_code, "log" in answer.json()["detail"]) == (500, True)
    assert "set-cookie" in answer.headers


class SessionClient:
    """One client's episode over HTTP without a cookie jar: a seed, some calls, and a verify request."""

    def __init__(self, client, number, calls):
        self.client, self.calls = client, list(calls)
        self.row = {**ROW, "initial_count": number, "expected_count": number + sum(calls)}
        self.steps = [self.seed, *([self.call] * len(calls)), self.verify]
        self.cookie, self.items, self.answers = {}, [], []

    async def post(self, path, body):
        request = self.client.build_request("POST", path, json=body, headers=self.cookie)
        answer = await self.client.send(request)
        self.client.cookies.clear()
        self.cookie = {"cookie": answer.headers["set-cookie"].split(";")[0]}
        self.answers.append((answer.status_code, answer.json()))
        return answer

    async def seed(self):
        await self.post("/seed_session", self.row)

    async def call(self):
        count, call_id = self.calls.pop(0), f"c{len(self.calls)}"
        answer = await self.post("/increment_counter", {"count": count})
        self.items += [
            responses.build_function_call("increment_counter", {"count": count}, call_id, id=call_id),
            responses.build_function_call_output(call_id, answer.text),
        ]

    async def verify(self):
        await self.post("/verify", build_verify_request(*self.items, row=self.row))


async def play_sessions(client, plans, order):
    sessions = [SessionClient(client, number, calls) for number, calls in enumerate(plans)]
    for index in order:
        await sessions[index].steps.pop(0)()
    return [session.answers for session in sessions]


def count_turns(plans):
    return [index for index, calls in enumerate(plans) for _ in range(len(calls) + 2)]


async def interleaved(resources_client, plans, order):
    async with resources_client() as client:
        one_by_one = await play_sessions(client, plans, count_turns(plans))
        assert await play_sessions(client, plans, order) == one_by_one
    assert {answers[-1][1]["reward"] for answers in one_by_one} == {1.5}


PLANS = st.lists(st.lists(st.integers(-5, 5), max_size=3), min_size=50, max_size=50)


@pytest.mark.slow
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(plans=PLANS, random=st.randoms(use_true_random=False))
def test_randomly_interleaved_sessions_give_the_results_of_sequential_ones(resources_client, plans, random):
    asyncio.run(interleaved(resources_client, plans, random.sample(order := count_turns(plans), len(order))))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
async def test_a_thousand_sessions_over_http_give_the_results_of_sequential_ones(counter, serve_app, seed):
    rng, environment = random.Random(seed), counter()
    plans = [[rng.randint(-5, 5) for _ in range(rng.randint(0, 3))] for _ in range(1000)]
    order = count_turns(plans)
    app = resources.create_app(environment)
    async with serve_app(app) as url, httpx.AsyncClient(base_url=url, timeout=60) as client:
        one_by_one = await play_sessions(client, plans, order)
        rng.shuffle(order)
        assert await play_sessions(client, plans, order) == one_by_one
    assert {answers[-1][1]["reward"] for answers in one_by_one} == {1.5}
    assert len(environment.plugin.CLOSED) == 2 * len(plans), "some sessions were not closed"
