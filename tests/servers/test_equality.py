"""A rollout over HTTP equals the rollout in process, field for field, for every installed environment."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from gymsdk import Environment, Model, load, model, play
from gymsdk.http import client as http
from gymsdk.rollouts import folder
from gymsdk.rollouts.jobs import Job, build_input_row, compute_seed
from gymsdk.servers import agent, environment, resources
from gymsdk.servers.balancing import LoadBalancer
from gymsdk.servers.instances import InstanceDirectory, nodes_fetcher
from gymsdk.servers.remote import RemoteEnvironment
from gymsdk.types import UNMASKED_FIELDS, Playable, Row

from .nodes import Instance, heading
from .reached import asked, listening

NAMES = ("math", "multineedle", "tool_call")
POLICIES = ("scripted/oracle", "scripted/random")
TASKS = 4
Played = Callable[[Row], Awaitable[Row]]


def rows(found: Environment) -> list[Row]:
    """Rows as they are sent, numbered."""
    tasks = islice(found.tasks(found.splits[0]), TASKS)
    return [
        build_input_row(task.row(), environment=found.name, task=number, sampling={}) | {"_ng_rollout_index": 0}
        for number, task in enumerate(tasks)
    ]


def compared(line: Row) -> Row:
    """Return a line without its ids, its timings and its trajectory, which only an environment server adds."""
    line = {key: value for key, value in line.items() if key != "ng_trajectory"}
    ours = {key: value for key, value in line["gymsdk"].items() if key not in {"id", "timing"}}
    response = {key: value for key, value in line["response"].items() if key not in {"id", "created_at"}}
    return orjson.loads(orjson.dumps({**UNMASKED_FIELDS, **line, "gymsdk": ours, "response": response}))


def directly(against: Playable, policy: Model) -> Played:
    """Plays rows with the loop itself, as a run does."""

    async def played(row: Row) -> Row:
        job = Job(against.name, row["_ng_task_index"], 0, {k: v for k, v in row.items() if not k.startswith("_ng_")})
        rollout = await play(against, policy, job.row, seed=compute_seed(0, job), id=job.id)
        assert rollout.failure is None, rollout.failure
        return folder.build_scored_line(rollout, job.key)

    return played


@asynccontextmanager
async def by_agent(found: Environment, policy: Model, _: Path) -> AsyncIterator[Played]:
    async with asked(agent.create_app(found, policy)) as client:
        yield lambda row: _posted(client, row)


@asynccontextmanager
async def by_environment_server(found: Environment, policy: Model, _: Path) -> AsyncIterator[Played]:
    async with asked(environment.create_app(found, policy)) as client:
        yield lambda row: _posted(client, row)


@asynccontextmanager
async def by_remote(found: Environment, policy: Model, recorded: Path) -> AsyncIterator[Played]:
    async with listening(resources.create_app(found)) as url:
        yield directly(RemoteEnvironment(url, found.name), _elsewhere(policy, recorded))


@asynccontextmanager
async def by_an_agent_elsewhere(found: Environment, policy: Model, recorded: Path) -> AsyncIterator[Played]:
    async with listening(resources.create_app(found)) as url:
        remote = RemoteEnvironment(url, found.name)
        async with asked(agent.create_app(remote, _elsewhere(policy, recorded))) as client:
            yield lambda row: _posted(client, row)


@asynccontextmanager
async def by_two_instances(found: Environment, policy: Model, recorded: Path) -> AsyncIterator[Played]:
    async with (
        heading() as head_url,
        Instance(found, head_url).there(),
        Instance(load(found.name), head_url).there(),
        asked(
            agent.create_app(
                LoadBalancer(found.name, InstanceDirectory(nodes_fetcher(head_url))), _elsewhere(policy, recorded)
            ),
        ) as client,
    ):
        yield lambda row: _posted(client, row)
        await http.aclose()


def _elsewhere(policy: Model, recorded: Path) -> Model:
    """The oracle only knows episodes of this process, so its actions are recorded and replayed over HTTP."""
    return model(f"scripted/replay:{recorded}") if "oracle" in repr(policy) else policy


async def _posted(client: httpx.AsyncClient, row: Row) -> Row:
    answer = await client.post("/run", json=row)
    assert answer.status_code == 200, answer.text
    told: Row = answer.json()
    return told


@pytest.mark.parametrize("way", [by_agent, by_environment_server, by_remote, by_an_agent_elsewhere, by_two_instances])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", NAMES)
async def test_a_rollout_over_http_equals_the_rollout_in_process(
    name: str, policy: str, way: Any, tmp_path: Path
) -> None:
    found, chosen, recorded = load(name), model(policy), tmp_path / "rollouts.jsonl"
    async with found:
        here = [await directly(found, chosen)(row) for row in rows(found)]
        recorded.write_bytes(b"\n".join(map(orjson.dumps, here)))
        async with way(load(name), chosen, recorded) as played:
            there = [await played(row) for row in rows(found)]
    for one, other in zip(here, there, strict=True):
        assert _without_model(compared(one)) == _without_model(compared(other))


def _without_model(line: Row) -> Row:
    return line | {"response": {key: value for key, value in line["response"].items() if key != "model"}}
