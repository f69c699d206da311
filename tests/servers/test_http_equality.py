"""A rollout over HTTP equals the rollout in process, field for field, for every installed environment."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import islice
from pathlib import Path

import httpx
import orjson
import pytest

from gymsdk import Environment, Model, load, model, play
from gymsdk.cluster.balancing import LoadBalancer
from gymsdk.cluster.directory import InstanceDirectory, nodes_fetcher
from gymsdk.http import client as http
from gymsdk.line import build_line
from gymsdk.rollouts.jobs import Job, build_input_row
from gymsdk.servers import agent, environment
from gymsdk.types import UNMASKED_FIELDS, Playable, Row

from .app_helpers import app_client
from .nodes import Instance, serve_head

NAMES = ("math", "multineedle", "tool_call")
POLICIES = ("scripted/oracle", "scripted/random")
TASKS = 4
PlayRow = Callable[[Row], Awaitable[Row]]


def rows(found: Environment) -> list[Row]:
    """Return numbered rows as a run sends them."""
    tasks = islice(found.tasks(found.splits[0]), TASKS)
    return [
        build_input_row(task.row(), environment=found.name, task=number, sampling={}) | {"_ng_rollout_index": 0}
        for number, task in enumerate(tasks)
    ]


def comparable(line: Row) -> Row:
    """Return a line without its ids, its timings, and its trajectory, which only an environment server adds."""
    line = {key: value for key, value in line.items() if key != "ng_trajectory"}
    gymsdk_fields = {key: value for key, value in line["gymsdk"].items() if key not in {"id", "timing"}}
    response = {key: value for key, value in line["response"].items() if key not in {"id", "created_at"}}
    return orjson.loads(orjson.dumps({**UNMASKED_FIELDS, **line, "gymsdk": gymsdk_fields, "response": response}))


def play_directly(against: Playable, policy: Model) -> PlayRow:
    """Return a function that plays rows in this process, as a run does."""

    async def play_row(row: Row) -> Row:
        job = Job(against.name, row["_ng_task_index"], 0, {k: v for k, v in row.items() if not k.startswith("_ng_")})
        rollout = await play(against, policy, job.row, seed=job.compute_seed(0), id=job.id)
        assert rollout.failure is None, rollout.failure
        return build_line(rollout, job.key)

    return play_row


@asynccontextmanager
async def by_agent(found: Environment, policy: Model, _: Path) -> AsyncIterator[PlayRow]:
    async with app_client(agent.create_app(found, policy)) as client:
        yield lambda row: _post(client, row)


@asynccontextmanager
async def by_environment_server(found: Environment, policy: Model, _: Path) -> AsyncIterator[PlayRow]:
    async with app_client(environment.create_app(found, policy)) as client:
        yield lambda row: _post(client, row)


@asynccontextmanager
async def by_two_instances(found: Environment, policy: Model, recorded: Path) -> AsyncIterator[PlayRow]:
    # The oracle knows only episodes of this process, so it is replayed.
    remote_policy = model(f"scripted/replay:{recorded}") if "oracle" in repr(policy) else policy
    async with (
        serve_head() as head_url,
        Instance(found, head_url).serve(),
        Instance(load(found.name), head_url).serve(),
        app_client(
            agent.create_app(LoadBalancer(found.name, InstanceDirectory(nodes_fetcher(head_url))), remote_policy),
        ) as client,
    ):
        yield lambda row: _post(client, row)
        await http.aclose()


async def _post(client: httpx.AsyncClient, row: Row) -> Row:
    answer = await client.post("/run", json=row)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.slow
@pytest.mark.parametrize("interface", [by_agent, by_environment_server, by_two_instances])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", NAMES)
async def test_a_rollout_over_http_equals_the_rollout_in_process(name, policy, interface, tmp_path):
    found, chosen, recorded = load(name), model(policy), tmp_path / "rollouts.jsonl"
    async with found:
        local_lines = [await play_directly(found, chosen)(row) for row in rows(found)]
        recorded.write_bytes(b"\n".join(map(orjson.dumps, local_lines)))
        async with interface(load(name), chosen, recorded) as play_row:
            http_lines = [await play_row(row) for row in rows(found)]
    for one, other in zip(local_lines, http_lines, strict=True):
        assert _without_model(comparable(one)) == _without_model(comparable(other))


def _without_model(line: Row) -> Row:
    return line | {"response": {key: value for key, value in line["response"].items() if key != "model"}}
