"""`RolloutCollectionHelper` fulfils what NeMo RL and verl read: rows, tokens, rewards, statuses and the order."""

from __future__ import annotations

import asyncio
import json
import pickle
import re
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import cloudpickle
import pytest
from aiohttp import ClientResponseError

from nemo_compat.conftest import AGENT, Start, build_rows
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.global_config import get_global_config_dict
from nemo_gym.rollout_collection import RolloutCollectionHelper, RunError
from nemo_gym.server_utils import ServerClient

pytestmark = pytest.mark.timeout(120)


async def play(rows: list[dict[str, Any]], head: BaseServerConfig | None) -> list[tuple[dict[str, Any], Any]]:
    return [await waiting for waiting in RolloutCollectionHelper().run_examples(rows, head)]


async def fail(row: Mapping[str, Any], head: BaseServerConfig) -> RunError:
    with pytest.raises(RunError) as caught:
        await play([dict(row)], head)
    return caught.value


def join_tokens(output: list[dict[str, Any]]) -> list[int]:
    """Return the tokens of the conversation, read as the trainers do: each prompt begins with all tokens before it."""
    seen: list[int] = []
    for item in output:
        generated = item.get("generation_token_ids")
        if not generated:
            continue
        assert item["prompt_token_ids"][: len(seen)] == seen
        assert len(item["generation_log_probs"]) == len(generated)
        seen = [*item["prompt_token_ids"], *generated]
    return seen


async def test_each_row_returns_with_reward_and_tokens(head: BaseServerConfig) -> None:
    rows = build_rows(12)
    played = await play(rows, head)
    assert sorted(row["_rowidx"] for row, _ in played) == [*range(12)]
    turns = []
    for row, result in played:
        assert row is rows[row["_rowidx"]]
        assert result["trainer_key"] == {"kept": [row["_rowidx"]]}
        assert result["_rowidx"] == row["_rowidx"]
        assert isinstance(result["reward"], float)
        assert sum(result["reward_components"].values()) == pytest.approx(result["reward"], rel=1e-5)
        assert result["responses_create_params"]["input"] == row["responses_create_params"]["input"]
        assert join_tokens(result["response"]["output"])
        turns.append(sum(bool(item.get("generation_token_ids")) for item in result["response"]["output"]))
        assert json.loads(json.dumps(result)) == result
        for pickler in (pickle, cloudpickle):
            assert pickler.loads(pickler.dumps((row, result))) == (row, result)
    assert max(turns) > 1
    assert max(result["reward"] for _, result in played) == 1.0


async def test_a_row_may_be_played_several_times(head: BaseServerConfig) -> None:
    (row,) = build_rows(1)
    played = await play([row, {**row}, row], head)
    assert [result["reward"] for _, result in played] == [1.0] * 3
    assert len({result["response"]["id"] for _, result in played}) == 3


WRONG_ROWS: tuple[dict[str, Any], ...] = (
    {"agent_ref": {"name": AGENT}},
    {"agent_ref": {"name": AGENT}, "responses_create_params": {"input": 4}},
)
UNKNOWN_AGENT = {"agent_ref": {"name": "nobody"}, "responses_create_params": {"input": "hi"}}


@pytest.mark.parametrize(
    ("row", "status", "message"),
    [
        (WRONG_ROWS[0], 422, "responses_create_params: Field required"),
        (WRONG_ROWS[1], 422, "input"),
        # NeMo Gym's client tries an unknown agent again for ten seconds.
        pytest.param(UNKNOWN_AGENT, 404, f"servers.*{AGENT}", marks=pytest.mark.slow),
    ],
    ids=["not a row", "wrong input", "unknown agent"],
)
async def test_a_wrong_row_is_an_error_of_the_data_that_can_leave_the_process(
    head: BaseServerConfig, row: dict[str, Any], status: int, message: str
) -> None:
    error = await fail(row, head)
    assert isinstance(error, ClientResponseError)
    assert error.status == status
    assert re.search(message, error.message)
    if status == 422:
        assert json.loads(error.response_content)["detail"]
    for pickler in (pickle, cloudpickle):
        copy = pickler.loads(pickler.dumps(error))
        assert (type(copy), copy.status, copy.message) == (RunError, status, error.message)
        assert copy.response_content == error.response_content
        assert str(copy.request_info.real_url) == str(error.request_info.real_url)
    assert status == 404 or str(error.request_info.real_url) == f"http://127.0.0.1:{head.port}/{AGENT}/run"


def read_as_verl(result: dict[str, Any]) -> float:
    """Return the reward; raises `ValueError` if no item of the output has tokens, and `KeyError` without an output."""
    if not [item for item in result["response"]["output"] if "generation_token_ids" in item]:
        raise ValueError("no generation data")
    return float(result["reward"])


async def collect_as_verl(rows: list[dict[str, Any]], head: BaseServerConfig) -> dict[int, float]:
    """Return the reward of each row, read as verl's recipe reads it; an error other than ValueError ends the batch."""
    rewards = {}
    for waiting in RolloutCollectionHelper().run_examples(examples=rows, head_server_config=head):
        row, result = await waiting
        try:
            rewards[row["_rowidx"]] = read_as_verl(result)
        except ValueError:
            rewards[row["_rowidx"]] = 0.0
    return rewards


@pytest.mark.parametrize("wrong", WRONG_ROWS)
async def test_a_refused_row_does_not_end_the_batch_of_verl(
    head: BaseServerConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, wrong: dict[str, Any]
) -> None:
    rows = [*build_rows(3), {**wrong, "_rowidx": 3}]
    # verl itself needs a GPU; the package only finds out whether the process has imported it.
    monkeypatch.setitem(sys.modules, "verl", ModuleType("verl"))
    rewards = await collect_as_verl(rows, head)
    assert sorted(rewards) == [0, 1, 2, 3]
    assert rewards[3] == 0.0
    assert max(rewards.values()) == 1.0
    assert "422" in caplog.text
    with pytest.raises(RunError, match="422"):
        await collect_as_verl([{**wrong, "_rowidx": number} for number in range(2)], head)


@pytest.mark.parametrize("wrong", WRONG_ROWS)
async def test_a_failed_row_may_be_a_result_as_in_nemo_gym(head: BaseServerConfig, wrong: dict[str, Any]) -> None:
    rows = [*build_rows(1), {**wrong, "_rowidx": 1}]
    helper = RolloutCollectionHelper()
    played = [await waiting for waiting in helper.run_examples(rows, head, route_failures_to_sidecar=True)]
    results = {row["_rowidx"]: result for row, result in played}
    assert results[0]["reward"] == 1.0
    failed = results[1]
    assert (failed["_ng_failure_class"], failed["_ng_failure_http_status"]) == ("agent_run_error", 422)
    assert failed["_ng_failure_type"] == "RunError"
    assert json.loads(failed["_ng_failure_response_body"])["detail"]
    assert not {"reward", "response"} & set(failed)


@pytest.mark.slow
async def test_engines_that_do_not_answer_are_an_error_of_the_infrastructure_that_ends_the_batch_of_verl(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, head = start(policy_base_url=["http://127.0.0.1:9/v1"])
    error = await fail(build_rows(1)[0], head)
    assert error.status == 503
    assert "127.0.0.1:9" in str(error)
    monkeypatch.setitem(sys.modules, "verl", ModuleType("verl"))
    with pytest.raises(RunError, match="503"):
        await collect_as_verl(build_rows(2), head)


@pytest.mark.slow
async def test_servers_that_have_ended_are_an_error_of_the_infrastructure(start: Start) -> None:
    helper, head = start()
    client = ServerClient.load_from_global_config(head)
    plays = RolloutCollectionHelper().run_examples(build_rows(1), head)
    helper.shutdown()
    with pytest.raises(RunError) as caught:
        await next(plays)
    assert caught.value.status == 503
    with pytest.raises(Exception, match=str(head.port)):
        await client.get(AGENT, "/")


async def test_a_row_finds_its_agent_by_its_task_source(head: BaseServerConfig) -> None:
    (row,) = build_rows(1)
    del row["agent_ref"]
    row["task_source"] = "tool_call"
    iterator = RolloutCollectionHelper().run_examples([row], head)
    assert row["agent_ref"]["name"] == AGENT, "trainers read agent_ref before they await the first rollout"
    _, result = await next(iterator)
    assert result["reward"] == 1.0


@pytest.mark.parametrize("wrong", [{"task_source": "chess"}, {}, {"agent_ref": {}}])
async def test_rows_without_an_agent_are_refused_before_any_is_sent(
    head: BaseServerConfig, wrong: dict[str, Any]
) -> None:
    rows = build_rows(2)
    del rows[1]["agent_ref"]
    rows[1] |= wrong
    with pytest.raises(ValueError, match=rf"row 1 .*1 of 2 rows.*{AGENT}"):
        RolloutCollectionHelper().run_examples(rows, head)
    assert len(asyncio.all_tasks()) == 1


async def test_a_semaphore_limits_the_rollouts_in_flight_and_all_may_be_awaited_together(
    head: BaseServerConfig,
) -> None:
    iterator = RolloutCollectionHelper().run_examples(build_rows(4), head, asyncio.Semaphore(1))
    assert [(await waiting)[0]["_rowidx"] for waiting in iterator] == [*range(4)]
    played = await asyncio.gather(*RolloutCollectionHelper().run_examples(build_rows(4), head))
    assert sorted(row["_rowidx"] for row, _ in played) == [*range(4)]


async def test_a_dropped_iterator_cancels_the_rollouts_that_nobody_waits_for(head: BaseServerConfig) -> None:
    row, _ = await next(RolloutCollectionHelper().run_examples(build_rows(1), head))
    assert row["_rowidx"] == 0
    iterator: Iterator[Any] | None = RolloutCollectionHelper().run_examples(build_rows(20), head, asyncio.Semaphore(1))
    assert iterator is not None
    await next(iterator)
    before = len(asyncio.all_tasks())
    iterator = None
    await asyncio.sleep(0.1)
    assert before > 15
    assert len(asyncio.all_tasks()) < 5


async def test_the_client_reaches_servers_by_name(head: BaseServerConfig) -> None:
    client = ServerClient.load_from_global_config(head)
    assert client.global_config_dict.tool_call.resources_servers.tool_call.entrypoint
    paused = await client.post("policy_model", "/pause")
    assert (paused.status, paused.ok) == (200, True)
    resumed = await client.request("policy_model", "/resume", "POST")
    assert (await resumed.json())["paused"] is False
    missing = await client.get("tool_call", "/nothing", headers={"x-test": "1"})
    assert (missing.status, missing.ok) == (404, False)
    assert "detail" in json.loads(await missing.text())
    with pytest.raises(ValueError, match="GET or POST"):
        await client.request("tool_call", "/", "PUT")


def test_the_latest_run_is_the_default(head: BaseServerConfig, start: Start) -> None:
    _, second = start()
    assert get_global_config_dict().head_server.port == second.port
    for address in (head, second):
        (played,) = asyncio.run(play(build_rows(1), address))
        assert played[1]["reward"] == 1.0
    (played,) = asyncio.run(play(build_rows(1), None))
    assert played[1]["reward"] == 1.0
