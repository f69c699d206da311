"""Load balancing over instances: each episode stays at the least loaded instance, and lost instances are avoided."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from itertools import islice
from typing import Any

import httpx
import pytest

from gymsdk import Task, load, model, play, responses
from gymsdk.cluster import router
from gymsdk.cluster.balancing import LoadBalancer, LocalInstance
from gymsdk.cluster.directory import InstanceDirectory, nodes_fetcher
from gymsdk.edge.errors import RequestRejected
from gymsdk.errors import BadRow, Failed
from gymsdk.http.backoff import Backoff
from gymsdk.observability.metrics import ServerMetrics
from gymsdk.servers import agent, resources
from gymsdk.types import ToolCall

from .app_helpers import app_client
from .nodes import MAX_AGE, Instance, fetch_nodes, serve_app, serve_head, serve_process, serve_two, wait_until

ROW = Task.ask("add", initial_count=1, expected_count=3).row()
JUDGED = {**ROW, "response": {"output": [responses.build_message("done")]}}
ADD = [("increment_counter", {"count": 2})]
CALL = ToolCall(name="increment_counter", arguments='{"count": 2}', call_id="c")


pytestmark = pytest.mark.usefixtures("close_client")


def build_balancer(head_url: str, name: str = "counter", **options: Any) -> LoadBalancer:
    directory = InstanceDirectory(nodes_fetcher(head_url), max_age=MAX_AGE)
    return LoadBalancer(name, directory, watch=0.1, **{"wait_seconds": 0.3} | options)


async def close_all(balancer: LoadBalancer, episodes: list[Any]) -> None:
    for episode in episodes:
        await balancer.close(episode)


async def list_loads(head_url: str) -> list[int]:
    return sorted(instance["load"]["sessions"] for instance in (await fetch_nodes(head_url))["instances"])


async def seed_sessions(url: str, count: int) -> httpx.Cookies:
    async with httpx.AsyncClient(base_url=url) as client:
        for _ in range(count):
            await client.post("/seed_session", json=ROW)
        return client.cookies


async def test_two_instances_share_the_load_and_each_episode_stays_at_its_instance(counter, policy):
    async with serve_two(counter, lease=0.6) as (head_url, one, other):
        balancer = build_balancer(head_url)
        episodes = [await balancer.reset(ROW) for _ in range(10)]
        assert (one.sessions, other.sessions) == (5, 5)
        await close_all(balancer, episodes)
        assert (one.sessions, other.sessions) == (0, 0)
        rollouts = await asyncio.gather(*(play(balancer, policy(ADD, ADD, "done"), ROW) for _ in range(6)))
        assert [rollout.reward for rollout in rollouts] == [0.5] * 6
        assert {rollout.verdict and rollout.verdict.model_dump()["final"] for rollout in rollouts} == {5}
        with pytest.raises(BadRow, match="does not fit environment 'counter'"):
            await balancer.reset(ROW | {"initial_count": "many"})
        await wait_until(lambda: (one.sessions, other.sessions) == (0, 0))
        # The episodes of other clients count.
        await seed_sessions(one.url, 4)

        async def is_reported():
            return await list_loads(head_url) == [0, 4]

        await wait_until(is_reported)
        balancer = build_balancer(head_url)
        episodes = [await balancer.reset(ROW) for _ in range(4)]
        assert (one.sessions, other.sessions) == (4, 4)
        await close_all(balancer, episodes)


async def test_an_instance_that_answers_again_gets_episodes_again(counter, monkeypatch, caplog):
    monkeypatch.setattr(router, "BREAKER_BACKOFF", Backoff(first=0.05, longest=0.05))
    async with serve_two(counter) as (head_url, one, other):
        # The head is asked once, so it does not report that the instance is unhealthy.
        known = InstanceDirectory(nodes_fetcher(head_url), max_age=600.0)
        balancer, metrics_after_restart = LoadBalancer("counter", known, watch=0.1), ServerMetrics("one")
        await known.renew()
        await one.shut_down()
        with caplog.at_level(logging.WARNING, "gymsdk"):
            episodes = [await balancer.reset(ROW) for _ in range(2)]
        assert other.sessions == 2
        assert sum("new episodes go to other instances" in message for message in caplog.messages) == 1
        app = resources.create_app(counter(), metrics=metrics_after_restart)
        async with serve_app(app, one.host, httpx.URL(one.url).port):
            await asyncio.sleep(0.2)
            episodes += [await balancer.reset(ROW) for _ in range(2)]
            assert (metrics_after_restart.sum_gauges("sessions_open"), other.sessions) == (2, 2)
            await close_all(balancer, episodes)


async def test_a_running_episode_at_a_lost_instance_fails_retryably_and_openings_go_to_another(counter, policy, caplog):
    async with serve_two(counter) as (head_url, one, other):
        balancer = build_balancer(head_url)
        episodes = [await balancer.reset(ROW) for _ in range(2)]
        await one.shut_down()
        answers = await asyncio.gather(*(balancer.step(episode, CALL) for episode in episodes), return_exceptions=True)
        [lost] = [answer for answer in answers if isinstance(answer, Failed)]
        assert (lost.kind, lost.stage, lost.retryable) == ("server_unreachable", "step", True)
        assert [answer.output for answer in answers if answer is not lost] == ['{"success":true}']
        await close_all(balancer, episodes)
        assert other.sessions == 0
        with caplog.at_level(logging.WARNING, "gymsdk"):
            rollouts = [await play(build_balancer(head_url), policy(ADD, "done"), ROW) for _ in range(4)]
    assert [rollout.reward for rollout in rollouts] == [1.5] * 4
    # A new balancer, which no failure has warned, tries each instance: every balancer logs at most one line.
    assert sum("new episodes go to other instances" in message for message in caplog.messages) <= 4


async def test_a_full_instance_is_skipped_and_if_all_are_full_the_client_waits(counter, monkeypatch):
    monkeypatch.setattr("gymsdk.servers.sessions.RETRY_AFTER_SECONDS", 1.0)
    async with serve_two(counter, max_sessions=2) as (head_url, one, other):
        await seed_sessions(one.url, 2)
        balancer = build_balancer(head_url)
        episodes = [await balancer.reset(ROW) for _ in range(2)]
        assert (one.sessions, other.sessions) == (2, 2)
        with pytest.raises(Failed, match="all 2 sessions are in use") as raised:
            await balancer.reset(ROW, deadline=asyncio.get_running_loop().time() + 0.5)
        assert raised.value.retryable
        opening = asyncio.ensure_future(balancer.reset(ROW))
        await close_all(balancer, episodes)
        await balancer.close(await opening)


@pytest.mark.parametrize("load_at_lost_instance", [0, 3])
async def test_a_full_instance_is_waited_for_even_if_another_is_gone(counter, monkeypatch, load_at_lost_instance):
    monkeypatch.setattr("gymsdk.servers.sessions.RETRY_AFTER_SECONDS", 0.2)
    async with (
        serve_head() as head_url,
        Instance(counter(), head_url, "127.0.0.2", 0.6, {"max_sessions": 1}).serve() as full,
        Instance(counter(), head_url, "127.0.0.3", 0.6).serve() as gone,
    ):
        cookies = await seed_sessions(full.url, 1)
        await seed_sessions(gone.url, load_at_lost_instance)

        async def is_reported():
            return await list_loads(head_url) == sorted([1, load_at_lost_instance])

        # The least loaded instance is asked first, so the order of the two rejections is known.
        await wait_until(is_reported)
        # The head still knows the instance: only its server is gone.
        await gone.shut_down()
        balancer = build_balancer(head_url)
        with pytest.raises(Failed, match="all 1 sessions are in use") as raised:
            await balancer.reset(ROW, deadline=asyncio.get_running_loop().time() + 0.1)
        assert (raised.value.kind, raised.value.retryable) == ("too_many", True)
        opening = asyncio.ensure_future(balancer.reset(ROW))
        async with httpx.AsyncClient(base_url=full.url, cookies=cookies) as owner:
            assert (await owner.post("/verify", json=JUDGED)).status_code == 200
            assert (await owner.post("/close_session", json={})).status_code == 200
        async with asyncio.timeout(30):
            await balancer.close(await opening)


async def test_without_an_instance_the_error_explains_how_to_start_one_and_a_late_one_is_waited_for(counter, policy):
    async with serve_head() as head_url:
        failure = (await play(build_balancer(head_url), policy("done"), ROW)).failure
        assert (failure.kind, failure.retryable) == ("server_unreachable", True)
        assert "`gymsdk serve counter --role resources --head URL`" in failure.message
        async with counter() as environment:
            local = build_balancer(head_url, local=LocalInstance("0" * 12, environment))
            assert (await play(local, policy(ADD, "done"), ROW)).reward == 1.5
        playing = asyncio.ensure_future(play(build_balancer(head_url, wait_seconds=10.0), policy(ADD, "done"), ROW))
        await asyncio.sleep(0.2)
        async with Instance(counter(), head_url).serve():
            assert (await playing).reward == 1.5


async def test_a_report_from_before_an_opening_hides_no_episode(counter):
    local = counter()
    async with serve_head() as head_url, Instance(counter(), head_url).serve() as other, local:
        snapshot = await nodes_fetcher(head_url)()
        fresh = [instance.model_copy(update={"age": 0.0}) for instance in snapshot.instances]
        balancer = build_balancer(head_url, local=LocalInstance("0" * 12, local))

        async def report_no_load():
            return snapshot.model_copy(update={"instances": fresh})

        balancer.instances._fetch_nodes = report_no_load
        episodes = []
        for _ in range(6):
            episodes.append(await balancer.reset(ROW))
            await balancer.instances._fetch()
        assert (sum(episode.environment is local for episode in episodes), other.sessions) == (3, 3)
        for episode in episodes:
            await balancer.close(episode)


async def test_an_agent_returns_the_metrics_of_an_instance(counter):
    rows = {"verify_responses": [{"reward": 1.0, "_ng_task_index": 0}, {"reward": 0.0, "_ng_task_index": 1}]}
    async with serve_two(counter) as (head_url, one, _):
        await one.shut_down()
        async with app_client(agent.create_app(build_balancer(head_url), model("scripted/random"))) as client:
            answer = await client.post("/aggregate_metrics", json=rows)
            wrong = await client.post("/aggregate_metrics", json={"verify_responses": 3})
        async with counter() as local, httpx.AsyncClient() as client:
            remote = build_balancer(head_url, local=LocalInstance("0" * 12, local))
            assert await remote.aggregate(rows) == answer.json()
            with pytest.raises(RequestRejected, match="must be a list of rows"):
                await remote.aggregate({"verify_responses": 3})
    assert answer.json()["agent_metrics"]["mean/reward"] == 0.5
    assert wrong.status_code == 422


async def test_a_process_that_stops_answering_delays_episodes_only_for_its_lease():
    row = next(load("multineedle").tasks("train")).row()
    async with serve_head(lease=1.0) as head_url, serve_process("multineedle", head_url, lease=1.0) as (started, _):
        balancer = build_balancer(head_url, "multineedle")
        episode = await balancer.reset(row)
        os.kill(started.pid, signal.SIGSTOP)
        async with asyncio.timeout(15):
            calls = (balancer.verify(episode), balancer.reset(row))
            failures = await asyncio.gather(*calls, return_exceptions=True)
        await balancer.close(episode)
    for failure in failures:
        assert isinstance(failure, Failed)
        assert (failure.retryable, failure.kind) == (True, "server_unreachable")


async def test_no_rollout_is_lost_if_one_of_two_processes_is_killed():
    chosen = model("scripted/random")
    rows = [task.row() for task in islice(load("multineedle").tasks("train"), 60)]
    async with (
        serve_head(lease=1.0) as head_url,
        serve_process("multineedle", head_url, lease=1.0) as (doomed, _),
        serve_process("multineedle", head_url, lease=1.0),
    ):
        balancer, slots = build_balancer(head_url, "multineedle"), asyncio.Semaphore(8)

        async def play_row(number):
            async with slots:
                if number == 20:
                    os.kill(doomed.pid, signal.SIGKILL)
                return await play(balancer, chosen, rows[number])

        rollouts = await asyncio.gather(*(play_row(number) for number in range(60)))
    failures = [rollout.failure for rollout in rollouts if rollout.failure is not None]
    assert all(failure.retryable for failure in failures), failures
    assert len(failures) <= 8
    assert all(rollout.outcome == "scored" for rollout in rollouts[40:])


async def test_a_draining_node_gets_no_new_episodes_and_finishes_its_own(counter):
    async with serve_two(counter) as (head_url, one, other):
        balancer = build_balancer(head_url)
        episodes = [await balancer.reset(ROW) for _ in range(2)]
        await one.node.drain()

        async def is_reported():
            found = await balancer.instances.find_by_name("counter", "resources_servers")
            return any(instance.draining for instance in found)

        await wait_until(is_reported)
        episodes += [await balancer.reset(ROW) for _ in range(2)]
        assert (one.sessions, other.sessions) == (1, 3)
        await one.node.leave()
        await balancer.instances.renew()
        answers = await asyncio.gather(*(balancer.step(episode, CALL) for episode in episodes))
        assert [answer.output for answer in answers] == ['{"success":true}'] * 4
        await close_all(balancer, episodes)
        assert (one.sessions, other.sessions) == (0, 0)


async def test_while_the_only_instance_drains_another_is_waited_for(counter, policy):
    async with serve_head() as head_url, Instance(counter(), head_url).serve() as one:
        balancer = build_balancer(head_url, wait_seconds=0.5)
        await one.node.drain()
        await balancer.instances.renew()
        playing = asyncio.ensure_future(play(balancer, policy(ADD, "done"), ROW))
        await asyncio.sleep(1.5)
        async with Instance(counter(), head_url).serve():
            rollout = await playing
    assert rollout.reward == 1.5


SLOW = """
@hookimpl
async def verify(task, transcript):
    await asyncio.sleep(0.5)
    return Verdict(reward=1.0)
"""


async def test_an_instance_that_left_remains_usable_while_it_answers(environment):
    async with serve_head() as head_url, Instance(environment(SLOW), head_url).serve() as one:
        balancer = build_balancer(head_url, "made")
        episode = await balancer.reset(ROW)
        await one.node.leave()
        # The verdict takes longer than several checks of the instance.
        verdict = await balancer.verify(episode)
        await balancer.close(episode)
    assert verdict.reward == 1.0


async def test_an_agent_continues_a_session_at_its_instance(counter, policy):
    tool = {"type": "function", "name": "increment_counter", "parameters": {"type": "object", "properties": {}}}
    async with serve_two(counter) as (head_url, one, other):
        for instance in (one, other):
            cookies = await seed_sessions(instance.url, 1)
            async with (
                httpx.AsyncClient(base_url=instance.url, cookies=cookies) as seeding,
                app_client(agent.create_app(build_balancer(head_url), policy(ADD, "done"))) as client,
            ):
                client.cookies = dict(cookies)
                answer = await client.post("/v1/responses", json={"input": "add", "tools": [tool]})
                assert answer.status_code == 200
                assert (await seeding.post("/get_counter_value", json={})).json() == {"count": 3}
