"""Load balancing over instances: each episode at the least loaded one, where it stays; lost instances are avoided."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import islice
from typing import Any

import httpx
import pytest

from gymsdk import Environment, Task, load, model, play, responses
from gymsdk.errors import BadRow, Failed
from gymsdk.http import client as http
from gymsdk.servers import agent, remote_episode
from gymsdk.servers.app import RequestRejected
from gymsdk.servers.balancing import LoadBalancer, LocalInstance
from gymsdk.servers.instances import InstanceDirectory, nodes_fetcher
from gymsdk.servers.remote_episode import InstanceTally
from gymsdk.types import ToolCall

from .nodes import LOOK, Instance, free, heading, process, told, until
from .reached import asked

ROW = Task.ask("add", initial_count=1, expected_count=3).row()
JUDGED = {**ROW, "response": {"output": [responses.build_message("done")]}}
ADD = [("increment_counter", {"count": 2})]
CALL = ToolCall(name="increment_counter", arguments='{"count": 2}', call_id="c")


@pytest.fixture(autouse=True)
async def closed():
    yield
    await http.aclose()


def spread(head_url: str, name: str = "counter", **options: Any) -> LoadBalancer:
    return LoadBalancer(
        name, InstanceDirectory(nodes_fetcher(head_url), max_age=LOOK), watch=0.1, **{"wait_seconds": 0.3} | options
    )


@asynccontextmanager
async def two(
    first: Environment, second: Environment, *, lease: float = 10.0, **options: Any
) -> AsyncIterator[tuple[str, Instance, Instance]]:
    """A head and two instances on different addresses."""
    async with (
        heading() as head_url,
        Instance(first, head_url, "127.0.0.2", lease, options).there() as one,
        Instance(second, head_url, "127.0.0.3", lease, options).there() as other,
    ):
        yield head_url, one, other


async def test_two_instances_share_the_load(counter):
    async with two(counter(), counter()) as (head_url, one, other):
        against = spread(head_url)
        episodes = [await against.reset(ROW) for _ in range(10)]
        assert (one.sessions, other.sessions) == (5, 5)
        for each in episodes:
            await against.close(each)
        assert (one.sessions, other.sessions) == (0, 0)


async def test_episodes_of_other_clients_count(counter):
    async with two(counter(), counter(), lease=0.6) as (head_url, one, other):
        async with httpx.AsyncClient(base_url=one.url) as client:
            for _ in range(4):
                await client.post("/seed_session", json=ROW)

        async def heard():
            return 4 in [each["load"]["sessions"] for each in (await told(head_url))["instances"]]

        await until(heard)
        against = spread(head_url)
        episodes = [await against.reset(ROW) for _ in range(4)]
        assert (one.sessions, other.sessions) == (4, 4)
        for each in episodes:
            await against.close(each)


async def test_an_episode_stays_at_its_instance(counter, policy):
    async with two(counter(), counter()) as (head_url, _, _):
        against = spread(head_url)
        rollouts = await asyncio.gather(*(play(against, policy(ADD, ADD, "done"), ROW) for _ in range(6)))
    assert [each.reward for each in rollouts] == [0.5] * 6
    assert {each.verdict and each.verdict.model_dump()["final"] for each in rollouts} == {5}


async def test_a_failed_opening_is_tried_at_another_instance(counter, policy, caplog):
    async with two(counter(), counter()) as (head_url, one, _):
        await one.cut()
        against = spread(head_url)
        with caplog.at_level(logging.WARNING, "gymsdk"):
            rollouts = [await play(against, policy(ADD, "done"), ROW) for _ in range(4)]
    assert [each.reward for each in rollouts] == [1.5] * 4
    assert len([each for each in caplog.records if "new episodes go to other instances" in each.getMessage()]) <= 1


async def test_a_running_episode_at_a_lost_instance_fails_retryably(counter, policy):
    async with two(counter(), counter()) as (head_url, one, other):
        against = spread(head_url)
        episodes = [await against.reset(ROW) for _ in range(2)]
        await one.cut()
        answers = await asyncio.gather(*(against.step(each, CALL) for each in episodes), return_exceptions=True)
        lost = [each for each in answers if isinstance(each, Failed)]
        assert [(each.kind, each.stage, each.retryable) for each in lost] == [("server_unreachable", "step", True)]
        assert [each.output for each in answers if not isinstance(each, BaseException)] == ['{"success":true}']
        for each in episodes:
            await against.close(each)
        assert other.sessions == 0


async def test_a_full_instance_is_skipped_and_if_all_are_full_the_client_waits(counter, monkeypatch):
    monkeypatch.setattr("gymsdk.servers.sessions.RETRY_AFTER_SECONDS", 1.0)
    async with two(counter(), counter(), max_sessions=2) as (head_url, one, other):
        async with httpx.AsyncClient(base_url=one.url) as client:
            for _ in range(2):
                await client.post("/seed_session", json=ROW)
        against = spread(head_url)
        episodes = [await against.reset(ROW) for _ in range(2)]
        assert (one.sessions, other.sessions) == (2, 2)
        with pytest.raises(Failed, match="all 2 sessions are in use") as raised:
            await against.reset(ROW, deadline=asyncio.get_running_loop().time() + 0.5)
        assert raised.value.retryable
        opening = asyncio.ensure_future(against.reset(ROW))
        for each in episodes:
            await against.close(each)
        await against.close(await opening)


@pytest.mark.parametrize("load_at_the_gone_one", [0, 3])
async def test_a_full_instance_is_waited_for_even_if_another_is_gone(counter, monkeypatch, load_at_the_gone_one):
    monkeypatch.setattr("gymsdk.servers.sessions.RETRY_AFTER_SECONDS", 0.2)
    async with (
        heading() as head_url,
        Instance(counter(), head_url, "127.0.0.2", 0.6, {"max_sessions": 1}).there() as full,
        Instance(counter(), head_url, "127.0.0.3", 0.6).there() as gone,
    ):
        async with httpx.AsyncClient(base_url=full.url) as client:
            await client.post("/seed_session", json=ROW)
        async with httpx.AsyncClient(base_url=gone.url) as other:
            for _ in range(load_at_the_gone_one):
                await other.post("/seed_session", json=ROW)

        async def heard():
            loads = [each["load"]["sessions"] for each in (await told(head_url))["instances"]]
            return sorted(loads) == sorted([1, load_at_the_gone_one])

        # The least loaded instance is asked first, so the order of the two rejections is known.
        await until(heard)
        # The head still knows the instance: only its server is gone.
        await gone.cut()
        against = spread(head_url)
        with pytest.raises(Failed, match="all 1 sessions are in use") as raised:
            await against.reset(ROW, deadline=asyncio.get_running_loop().time() + 0.1)
        assert (raised.value.kind, raised.value.retryable) == ("too_many", True)
        opening = asyncio.ensure_future(against.reset(ROW))
        async with httpx.AsyncClient(base_url=full.url, cookies=client.cookies) as owner:
            assert (await owner.post("/verify", json=JUDGED)).status_code == 200
            assert (await owner.post("/close_session", json={})).status_code == 200
        async with asyncio.timeout(30):
            await against.close(await opening)


async def test_a_row_that_does_not_fit_is_sent_to_one_instance_only(counter):
    async with two(counter(), counter()) as (head_url, _, _):
        with pytest.raises(BadRow, match="does not fit environment 'counter'"):
            await spread(head_url).reset(ROW | {"initial_count": "many"})


async def test_without_an_instance_the_error_explains_how_to_start_one(policy):
    async with heading() as head_url:
        rollout = await play(spread(head_url), policy("done"), ROW)
    assert rollout.failure is not None
    assert (rollout.failure.kind, rollout.failure.retryable) == ("server_unreachable", True)
    assert "`gymsdk serve counter --role resources --head URL`" in rollout.failure.message


async def test_an_instance_that_starts_late_is_waited_for(counter, policy):
    async with heading() as head_url:
        playing = asyncio.ensure_future(play(spread(head_url, wait_seconds=10.0), policy(ADD, "done"), ROW))
        await asyncio.sleep(0.2)
        async with Instance(counter(), head_url).there():
            rollout = await playing
    assert rollout.reward == 1.5


async def test_a_lost_head_stops_no_episode(counter, policy):
    async with heading() as head_url, Instance(counter(), head_url).there():
        against = spread(head_url)
        await against.instances.renew()
        look = against.instances._fetch_nodes

        async def hanging():
            await asyncio.sleep(60)
            return await look()

        against.instances._fetch_nodes = hanging
        rollouts = [await play(against, policy(ADD, "done"), ROW) for _ in range(3)]
    assert [each.reward for each in rollouts] == [1.5] * 3


async def test_the_local_instance_takes_part(counter, policy):
    here = counter()
    async with heading() as head_url, Instance(counter(), head_url).there() as other, here:
        against = spread(head_url, local=LocalInstance("0" * 12, here))
        episodes = [await against.reset(ROW) for _ in range(6)]
        assert (sum(each.environment is here for each in episodes), other.sessions) == (3, 3)
        for each in episodes:
            await against.close(each)
        rollouts = [await play(against, policy(ADD, "done"), ROW) for _ in range(2)]
    assert [each.reward for each in rollouts] == [1.5] * 2
    assert here.plugin.CLOSED.count(1) == 4


async def test_without_others_the_local_instance_gets_all_episodes(counter, policy):
    here = counter()
    async with heading() as head_url, here:
        rollout = await play(spread(head_url, local=LocalInstance("0" * 12, here)), policy(ADD, "done"), ROW)
    assert rollout.reward == 1.5


async def test_an_agent_returns_the_metrics_of_an_instance(counter):
    rows = {"verify_responses": [{"reward": 1.0, "_ng_task_index": 0}, {"reward": 0.0, "_ng_task_index": 1}]}
    async with two(counter(), counter()) as (head_url, one, _):
        await one.cut()
        async with asked(agent.create_app(spread(head_url), model("scripted/random"))) as client:
            answer = await client.post("/aggregate_metrics", json=rows)
            wrong = await client.post("/aggregate_metrics", json={"verify_responses": 3})
        async with counter() as here, httpx.AsyncClient() as client:
            there = spread(head_url, local=LocalInstance("0" * 12, here))
            assert await there.aggregate(rows) == answer.json()
            with pytest.raises(RequestRejected, match="must be a list of rows"):
                await there.aggregate({"verify_responses": 3})
    assert answer.json()["agent_metrics"]["mean/reward"] == 0.5
    assert wrong.status_code == 422


async def test_a_process_that_stops_answering_delays_episodes_only_for_its_lease(policy):
    found = load("multineedle")
    row = next(found.tasks("train")).row()
    async with heading(lease=1.0) as head_url, process("multineedle", head_url, lease=1.0) as (started, _):
        against = spread(head_url, "multineedle")
        episode = await against.reset(row)
        os.kill(started.pid, signal.SIGSTOP)
        verifying = asyncio.ensure_future(against.verify(episode))
        opening = asyncio.ensure_future(against.reset(row))
        done, _ = await asyncio.wait({verifying, opening}, timeout=15)
        assert done == {verifying, opening}
        failures = [each.exception() for each in (verifying, opening)]
        await against.close(episode)
    assert all(isinstance(each, Failed) and each.retryable and each.kind == "server_unreachable" for each in failures)


async def test_no_rollout_is_lost_if_one_of_two_processes_is_killed():
    found, chosen = load("multineedle"), model("scripted/random")
    rows = [task.row() for task in islice(found.tasks("train"), 60)]
    async with (
        heading(lease=1.0) as head_url,
        process("multineedle", head_url, lease=1.0) as (doomed, _),
        process("multineedle", head_url, lease=1.0),
    ):
        against, slots, killed = spread(head_url, "multineedle"), asyncio.Semaphore(8), []

        async def played(number):
            async with slots:
                if number == 20:
                    killed.append(os.kill(doomed.pid, signal.SIGKILL))
                return await play(against, chosen, rows[number])

        rollouts = await asyncio.gather(*(played(number) for number in range(60)))
    failures = [each.failure for each in rollouts if each.failure is not None]
    assert killed
    assert all(each.retryable for each in failures), failures
    assert len(failures) <= 8
    assert all(each.outcome == "scored" for each in rollouts[40:])


async def test_an_instance_that_the_head_has_lost_gets_no_new_episodes(counter):
    async with heading() as head_url:
        async with Instance(counter(), head_url, "127.0.0.2").there():
            pass
        async with Instance(counter(), head_url, "127.0.0.3").there() as left:
            assert [each["url"] for each in (await told(head_url))["instances"]] == [left.url]
            against = spread(head_url)
            episode = await against.reset(ROW)
            await until(lambda: left.sessions == 1)
            await against.close(episode)


async def test_a_draining_node_gets_no_new_episodes_and_finishes_its_own(counter):
    async with two(counter(), counter()) as (head_url, one, other):
        against = spread(head_url)
        episodes = [await against.reset(ROW) for _ in range(2)]
        await one.node.drain()

        async def heard():
            return any(each.draining for each in await against.instances.find_by_name("counter", "resources_servers"))

        await until(heard)
        episodes += [await against.reset(ROW) for _ in range(2)]
        assert (one.sessions, other.sessions) == (1, 3)
        await one.node.leave()
        await against.instances.renew()
        answers = await asyncio.gather(*(against.step(each, CALL) for each in episodes))
        assert [each.output for each in answers] == ['{"success":true}'] * 4
        for each in episodes:
            await against.close(each)
        assert (one.sessions, other.sessions) == (0, 0)


async def test_while_the_only_instance_drains_another_is_waited_for(counter, policy):
    async with heading() as head_url, Instance(counter(), head_url).there() as one:
        against = spread(head_url, wait_seconds=0.5)
        await one.node.drain()
        await against.instances.renew()
        playing = asyncio.ensure_future(play(against, policy(ADD, "done"), ROW))
        await asyncio.sleep(1.5)
        async with Instance(counter(), head_url).there():
            rollout = await playing
    assert rollout.reward == 1.5


SLOW = """
@hookimpl
async def verify(task, transcript):
    await asyncio.sleep(0.5)
    return Verdict(reward=1.0)
"""


async def test_an_instance_that_left_remains_usable_while_it_answers(environment):
    async with heading() as head_url, Instance(environment(SLOW), head_url).there() as one:
        against = spread(head_url, "made")
        episode = await against.reset(ROW)
        await one.node.leave()
        # Longer than some looks whether it is still known.
        verdict = await against.verify(episode)
        await against.close(episode)
    assert verdict.reward == 1.0


async def test_a_restarted_head_removes_no_instance(counter, policy):
    port = free()
    async with heading(port=port) as head_url:
        one = Instance(counter(), head_url)
        there = one.there()
        await there.__aenter__()
        against = spread(head_url)
        await against.close(await against.reset(ROW))
    async with heading(port=port):
        await against.instances.renew()
        assert (await told(head_url))["instances"] == []
        rollout = await play(against, policy(ADD, "done"), ROW)
        await there.__aexit__(None, None, None)
    assert rollout.reward == 1.5


async def test_an_agent_continues_a_session_at_its_instance(counter, policy):
    tool = {"type": "function", "name": "increment_counter", "parameters": {"type": "object", "properties": {}}}
    async with two(counter(), counter()) as (head_url, one, other):
        for each in (one, other):
            async with (
                httpx.AsyncClient(base_url=each.url) as seeding,
                asked(agent.create_app(spread(head_url), policy(ADD, "done"))) as client,
            ):
                await seeding.post("/seed_session", json=ROW)
                cookies = "; ".join(f"{name}={value}" for name, value in seeding.cookies.items())
                body = {"input": "add", "tools": [tool]}
                answer = await client.post("/v1/responses", json=body, headers={"cookie": cookies})
                assert answer.status_code == 200
                assert (await seeding.post("/get_counter_value", json={})).json() == {"count": 3}


def test_a_tally_stays_bounded_and_correct_while_the_head_is_silent() -> None:
    tally = InstanceTally()
    for _ in range(remote_episode.MAX_CHANGES):
        tally.record_change(1)
        tally.record_change(-1)
    tally.record_change(1)
    assert len(tally.changes) <= remote_episode.MAX_CHANGES
    assert tally.change_since(0.0) == 1
    assert tally.change_since(time.monotonic() + 1) == 0
    tally.record_change(1)
    assert tally.change_since(0.0) == 1
