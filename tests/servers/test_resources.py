"""A resources server: rows seeded, tools called, responses verified, bad requests rejected."""

from __future__ import annotations

import asyncio
import gc
import logging

import httpx
import orjson
import pytest

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
MINIMAL = {"id": "resp", "created_at": 0, "model": "m", "object": "response", "output": [DONE]}
MINIMAL |= {"parallel_tool_calls": True, "tool_choice": "auto", "tools": []}


IDS = {"episode_id": {"rollout_id": "r1", "attempt": 0}, "task_id": {"taskset": "t", "task_id": "1"}}
TYPED = {"resources_session_id": "s1", **IDS, "task_data": {"initial_count": 3, "expected_count": 6}}
PATHS = ("/seed_session", "/verify", "/close_session", "/aggregate_metrics", "/reset", "/step")


def offer(name):
    tool = {"type": "function", "name": name, "parameters": {"type": "object", "properties": {}}}
    return {**ROW, "responses_create_params": {"input": INPUT, "tools": [tool]}}


def build_verify_request(*items, row=ROW):
    return {**row, "response": {**MINIMAL, "output": [*items, DONE]}}


async def test_a_row_is_verified_without_a_session_and_seeded_called_and_verified(client):
    alone = (await client.post("/verify", json=build_verify_request(*ADDED))).json()
    assert (await client.post("/seed_session", json=ROW)).json() == {}
    called = await client.post("/increment_counter", json={"count": 3})
    assert (called.status_code, called.text) == (200, '{"success":true}')
    answer = (await client.post("/verify", json=build_verify_request(*ADDED))).json()
    for verdict in (alone, answer):
        assert (verdict["reward"], verdict["final"], verdict["replies"]) == (1.5, 6, 1)
    assert answer["reward_components"] == {"verdict": 1.0, "steps": 0.5}
    assert (answer["mask_sample"], answer["failure_kind"], answer["failure_reason"]) == (False, None, None)


async def test_verify_echoes_its_input(client):
    body = build_verify_request() | {"more": [1], "_ng_task_index": 4, "_ng_rollout_id": "a-1", "gymsdk": {"seed": 5}}
    answer = (await client.post("/verify", json=body)).json()
    assert answer["response"] == body["response"]
    assert answer["responses_create_params"] == ROW["responses_create_params"]
    assert (answer["more"], answer["_ng_task_index"], answer["initial_count"]) == ([1], 4, 3)
    assert "_ng_rollout_id" not in answer
    assert answer["gymsdk"]["seed"] == 5
    assert answer["gymsdk"]["verdict"] == ["grader_timeout", "final", "replies", "said", "opening"]


async def test_an_agent_of_gymsdk_can_ask_for_the_verdict_alone(client):
    request = build_verify_request(*ADDED)
    complete = (await client.post("/verify", json=request)).json()
    verdict = (await client.post("/verify", json=request | {"gymsdk": {"echo": False}})).json()
    echoed = (await client.post("/verify", json=request | {"gymsdk": {"echo": True}})).json()
    assert verdict == {key: value for key, value in complete.items() if key not in request}
    assert (verdict["reward"], echoed["response"]) == (complete["reward"], request["response"])


async def test_nulls_added_by_a_table_do_not_matter(client):
    nulls = {"nested": {"a": None, "b": 1}, "initial_count": 3, "expected_count": None, "other": None}
    message = {"role": "user", "content": "add 3", "type": None}
    row = {"responses_create_params": {"input": [message], "tools": None}, **nulls}
    item = {"role": "assistant", "type": None, "status": None, "content": [{"type": "output_text", "text": "done"}]}
    answer = await client.post("/verify", json={**row, "response": {**MINIMAL, "output": [item]}})
    assert (answer.status_code, answer.json()["said"]) == (200, "done")
    assert (await client.post("/seed_session", json=row)).status_code == 200


async def test_a_judged_session_holds_no_episode_and_repeats_its_verdict(resources_client, counter):
    environment = counter()
    async with resources_client(environment) as client:
        await client.post("/seed_session", json=ROW)
        await client.post("/increment_counter", json={"count": 3})
        first = await client.post("/verify", json=build_verify_request(*ADDED))
        async with asyncio.timeout(10):
            while not environment.plugin.CLOSED:  # noqa: ASYNC110  # the session closes its episode in the background
                await asyncio.sleep(0.01)
        gc.collect()
        assert not [item for item in gc.get_objects() if isinstance(item, Episode) and item.environment is environment]
        again = await client.post("/verify", json=build_verify_request(*ADDED))
        other = await client.post("/verify", json=build_verify_request(*ADDED, responses.build_message("more", id="n")))
        called = await client.post("/get_counter_value")
        seeded = await client.post("/seed_session", json=ROW)
        figures = (await client.get("/metrics")).text
    assert again.json() == first.json()
    assert [(answer.status_code, answer.json()["kind"]) for answer in (other, called)] == [(409, "session_judged")] * 2
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


async def test_a_truncated_turn_is_not_played(client):
    truncated = build_verify_request(*ADDED)
    truncated["response"]["incomplete_details"] = {"reason": "max_output_tokens"}
    alone = (await client.post("/verify", json=truncated)).json()
    await client.post("/seed_session", json=ROW)
    await client.post("/increment_counter", json={"count": 3})
    with_session = (await client.post("/verify", json=truncated)).json()
    found = (alone["reward"], alone["replies"], alone["said"], alone["gymsdk"]["ended"])
    assert found == (1.0, 0, "done", "tokens")
    assert {**with_session, "opening": 0} == {**alone, "opening": 0}


@pytest.mark.parametrize("more", [{}, {"gymsdk": {"budget": {"tools": 99}}}], ids=["the server's budget", "the row's"])
async def test_calls_after_the_end_are_answered_not_run(resources_client, more):
    async with resources_client(budget=Budget(tools=1)) as client:
        await client.post("/seed_session", json=ROW | more)
        await client.post("/increment_counter", json={"count": 3})
        answers = [await client.post("/increment_counter", json={"count": 3}) for _ in range(2)]
    assert [answer.json() for answer in answers] == [{"error": "not run: the episode is over"}] * 2
    assert answers[0].headers["x-gymsdk-step"] == '{"reward":0.0,"done":true}'


async def test_only_the_episodes_tools_can_be_called(client):
    alone = await client.post("/spell", json={})
    assert alone.status_code == 409
    assert alone.json()["detail"].startswith("the request has no session: POST a row to /seed_session first")
    await client.post("/seed_session", json=offer("spell"))
    assert (await client.post("/spell", json={})).text == "it is 3"
    refused = await client.post("/get_counter_value", json={})
    unknown = await client.post("/no_such_tool", json={})
    assert refused.json()["error"].startswith("There is no tool named 'get_counter_value'.")
    assert (unknown.status_code, unknown.json()) == (404, {"detail": "Not Found"})
    await client.post("/seed_session", json=offer("rows_own"))
    answer = await client.post("/rows_own", json={})
    assert (answer.status_code, "cannot be run here" in answer.text) == (200, True)


async def test_an_endpoint_is_not_a_tool_and_a_tool_named_like_one_causes_a_warning(resources_client, caplog):
    with caplog.at_level(logging.WARNING, "gymsdk"):
        async with resources_client() as client:
            await client.post("/seed_session", json=ROW)
            for name in ("verify", "seed_session", "aggregate_metrics", "reset", "step"):
                assert (await client.post(f"/{name}", json={"count": 1})).status_code == 422, name
            assert [(await client.post(f"/{name}")).status_code for name in ("mcp", "docs", "livez")] == [404, 405, 405]
    assert "tools named like an endpoint cannot be called over HTTP: verify" in caplog.text


async def test_a_failing_tool_leaves_the_session_usable(client):
    await client.post("/seed_session", json=ROW)
    broken = await client.post("/stumble", json={})
    assert (broken.status_code, broken.json()["stage"], broken.json()["kind"]) == (503, "step", "tool_raised")
    assert (await client.post("/get_counter_value", json={})).json() == {"count": 103}


async def test_invalid_arguments_are_answered_as_in_process_and_bytes_that_are_not_text_rejected(client):
    await client.post("/seed_session", json=ROW)
    for text, message in (
        ("{", "Invalid tool call arguments"),
        ("[1]", "takes a JSON object"),
        ('{"count": "\\ud800"}', "Invalid tool call arguments"),
        ('{"count": NaN}', "Invalid tool call arguments"),
        ('{"count": null}', "count"),
        ("", "count"),
    ):
        answer = await client.post("/increment_counter", content=text)
        assert (answer.status_code, message in answer.json()["error"]) == (200, True), text
    assert (await client.post("/increment_counter", content=b"\xff")).status_code == 422


async def test_a_megabyte_and_half_a_surrogate_pair_are_accepted(client):
    large = await client.post("/verify", json=build_verify_request(row={**ROW, "long": "x" * 2**20}))
    assert (large.status_code, len(large.json()["long"])) == (200, 2**20)
    body = orjson.dumps(build_verify_request()).replace(b'"done"', b'"\\ud83d"')
    answer = await client.post("/verify", content=body)
    assert (answer.status_code, answer.json()["said"]) == (200, "\ud83d")


@pytest.mark.parametrize("path", PATHS)
async def test_a_body_that_is_not_an_object_or_nested_too_deeply_is_rejected(client, path):
    for content in (b"{", b"[]", b'"x"', b"NaN", b'{"a": NaN}', b"\xff"):
        answer = await client.post(path, content=content)
        assert (answer.status_code, "detail" in answer.json()) == (422, True), content
    body = orjson.dumps({**build_verify_request(), "deep": 1, "verify_responses": []})
    for depth in (300, 1000, 100_000):
        deep = b'{"a":' * depth + b"1" + b"}" * depth
        answer = await client.post(path, content=body.replace(b'"deep":1', b'"deep":' + deep))
        assert answer.status_code in ({413} if depth == 100_000 else {200, 409, 422}), (depth, answer.text)


async def test_an_invalid_response_is_rejected(client):
    outputs = ([1], [{"content": [1]}], [{"call_id": []}])
    for response in (None, [], {}, {"output": None}, *({"output": output} for output in outputs)):
        answer = await client.post("/verify", json={**ROW, "response": response})
        assert answer.status_code == 422, response
        assert answer.json()["detail"].startswith("`response` must be a Response object")


async def test_a_row_that_does_not_fit_is_rejected_with_a_message(client):
    for change, message in (
        ({"responses_create_params": None}, "the row does not fit environment 'counter'"),
        ({"initial_count": "many"}, "initial_count"),
        ({"_ng_rollout_id": "no spaces"}, "`_ng_rollout_id` must be"),
        ({"gymsdk": {"budget": {"turns": 0}}}, "the row's budget is invalid: turns"),
    ):
        for path in ("/seed_session", "/verify"):
            answer = await client.post(path, json={**build_verify_request(), **change})
            assert (answer.status_code, message in answer.json()["detail"]) == (422, True), answer.text
    bare = {key: value for key, value in build_verify_request().items() if key != "responses_create_params"}
    answers = [await client.post(path, json=bare) for path in ("/seed_session", "/verify", "/reset")]
    assert [answer.status_code for answer in answers] == [422] * 3


async def test_the_seed_comes_from_the_client_the_task_or_the_row(client):
    async def seed(**more):
        opened = await client.post("/seed_session", json={**ROW, **more, "gymsdk": more.get("gymsdk", {})})
        return opened.json()["gymsdk"]["seed"]

    assert await seed(gymsdk={"seed": 7}) == 7
    assert await seed(_ng_task_index=1) == await seed(_ng_task_index=1, expected_count=9)
    assert await seed() == await seed(agent_ref={"name": "a"}, other=None)
    assert await seed() != await seed(other=1)


async def test_the_typed_body_opens_a_session_that_verify_finds_by_the_flat_row(client):
    for change in ({"episode_id": None}, {"task_data": 1}, {"extra": 1}, {"task_id": {"taskset": "t"}}):
        answer = await client.post("/seed_session", json={**TYPED, **change})
        assert (answer.status_code, answer.json()["detail"][0]["loc"][:2]) == (422, ["body", *change])
    seeded = await client.post("/seed_session", json=TYPED)
    assert seeded.json() == {"resources_session_id": "s1"}
    await client.post("/increment_counter", json={"count": 3})
    verdict = (await client.post("/verify", json=build_verify_request(*ADDED))).json()
    assert (verdict["reward"], verdict["final"], verdict["opening"]) == (1.5, 6, 2)


async def test_a_failed_judge_masks_the_sample_of_a_typed_session(resources_client, counter):
    async with resources_client(counter(judge="down")) as client:
        await client.post("/seed_session", json=TYPED)
        answer = await client.post("/verify", json=build_verify_request())
    assert answer.status_code == 200
    expected = {"reward": 0.0, "mask_sample": True, "failure_kind": "judge_failed", "_ng_failure_class": "judge_failed"}
    assert expected.items() <= answer.json().items()
    assert answer.json()["failure_reason"] == "the judge is down"


async def test_aggregate_metrics_count_the_rows_that_nemo_gym_counts(client):
    for change, reward in (
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
    ):
        answer = await client.post("/aggregate_metrics", json={"verify_responses": [{**ROW, "reward": 1.0, **change}]})
        groups = [group["_ng_task_index"] for group in answer.json()["group_level_metrics"]]
        assert (answer.status_code, answer.json()["agent_metrics"].get("mean/reward")) == (200, reward), change
        assert groups == [0] * (reward is not None), change
    empty = (await client.post("/aggregate_metrics", json={"verify_responses": []})).json()
    lists = {"group_level_metrics": [], "repeat_level_metrics": []}
    assert empty == {"agent_metrics": {}, "key_metrics": {}, **lists}


async def test_aggregate_metrics_of_invalid_rows_are_rejected(client):
    for rows in (None, 1, [1], [{"reward": 1.0, "_ng_task_index": "x"}], [{"reward": 1, "_ng_rollout_index": []}]):
        assert (await client.post("/aggregate_metrics", json={"verify_responses": rows})).status_code == 422, rows


async def test_aggregate_metrics_of_many_rows_are_the_same(client, monkeypatch):
    rows = [{**ROW, "_ng_task_index": number // 2, "reward": number % 2} for number in range(20)]
    few = await client.post("/aggregate_metrics", json={"verify_responses": rows})
    monkeypatch.setattr(aggregates, "THREAD_ROW_COUNT", 5)
    many = await client.post("/aggregate_metrics", json={"verify_responses": rows})
    assert many.json() == few.json()
    assert few.json()["agent_metrics"]["mean/reward"] == 0.5


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


async def test_verified_rows_can_be_aggregated_and_verified_again(client):
    rows = [(await client.post("/verify", json=build_verify_request(*ADDED))).json() for _ in range(2)]
    found = (await client.post("/aggregate_metrics", json={"verify_responses": rows})).json()
    assert found["key_metrics"]["mean/reward"] == 1.5
    assert "mean/initial_count" not in found["agent_metrics"], "a number of the row is not a metric"
    assert "mean/mask_sample" not in found["agent_metrics"]
    first = (await client.post("/verify", json={**build_verify_request(*ADDED), "gymsdk": {"seed": 3}})).json()
    assert (await client.post("/verify", json=first)).json() == first


async def test_a_call_and_a_verdict_of_one_session_do_not_overlap(client):
    await client.post("/seed_session", json=ROW)
    calls = [client.post("/increment_counter", json={"count": 1}) for _ in range(20)]
    verdicts = [client.post("/verify", json=build_verify_request()) for _ in range(5)]
    answers = await asyncio.gather(*calls, *verdicts)
    # The verdict includes a call that arrived before it and excludes a later one.
    counted = sum(answer.status_code == 200 for answer in answers[:20])
    assert {answer.status_code for answer in answers} <= {200, 409}
    assert {(answer.json()["replies"], answer.json()["final"]) for answer in answers[20:]} == {(1, 3 + counted)}


async def test_only_a_post_calls_a_tool(client):
    got, missing = await client.get("/spell"), await client.get("/no_such_tool")
    assert (got.status_code, got.headers["allow"]) == (405, "POST")
    assert (missing.status_code, missing.json()) == (404, {"detail": "Not Found"})
    assert (await client.get("/verify")).headers["allow"] == "POST"
    assert (await client.post("/reverify_mode")).headers["allow"] == "GET"


async def test_every_server_reports_its_health(client):
    await client.post("/seed_session", json=ROW)
    for path in ("/", "/livez", "/readyz", "/healthz"):
        assert (await client.get(path)).json() == {"status": "ok"}
    metrics = (await client.get("/metrics")).text
    assert metric(metrics, "sessions_open", server="counter") == 1
    assert metric(metrics, "requests_total", server="counter", route="/seed_session", status="200") == 1
    assert (await client.get("/docs")).status_code == 200
    paths = (await client.get("/openapi.json")).json()["paths"]
    assert {"/seed_session", "/verify", "/increment_counter", "/step"} <= paths.keys()
    body = paths["/increment_counter"]["post"]["requestBody"]
    assert body["content"]["application/json"]["schema"]["required"] == ["count"]


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
