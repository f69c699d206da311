"""The environment server of NeMo Gym 0.7: a flat row or an episode request, played by the same loop as anywhere."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, ConfigDict

from gymsdk import context
from gymsdk.episode import Budget
from gymsdk.errors import UsageError
from gymsdk.jsonl import is_finite_number
from gymsdk.metrics import ROLLOUT_INDEX, TASK_INDEX
from gymsdk.observability.metrics import ServerMetrics
from gymsdk.rollouts.folder import ATTEMPT_INDEX, TRAJECTORY
from gymsdk.rollouts.trajectory import observations, task_name, trajectory
from gymsdk.servers.agent import MAX_CONCURRENT_EPISODES, MAX_QUEUED_EPISODES, RolloutFailed, RunService
from gymsdk.servers.app import (
    AGGREGATE_SCHEMA,
    FLAT_ROW_SCHEMA,
    RequestRejected,
    ServerOverloaded,
    document_endpoint,
    json_response,
    read_json_object,
)
from gymsdk.servers.app import create_app as bare
from gymsdk.servers.middleware import cancel_on_disconnect
from gymsdk.servers.requests import EpisodeId, RowRequest, TaskId, parse_body, parse_row_request
from gymsdk.servers.routing import rollout_id_of
from gymsdk.types import Failure, Item, Model, Playable, Rollout, Row

MAX_FAILURE_CHARS = 2000
"""Characters a failure's reason may have."""

STAGE_NAMES = {
    "admission": "admission",
    "reset": "seed",
    "model": "agent",
    "step": "agent",
    "verify": "verification",
    "close": "cleanup",
}
"""What the stages of an episode are called there."""

REGISTERED_FAILURES = frozenset({"judge_failed", "judge_unparseable"})
"""The kinds of failure that have the same name there; others are ours, and say so."""

DEFAULT_FAILURE = "environment_server_failed"
"""The class of every other failure in the collector's failures file."""

OBSERVATION_FIELDS = frozenset({"ng_trajectory", "ng_model_call_capture", "ng_perf", "ng_agent_observations"})
"""What a result may not hold, beside whatever begins with `_ng_`: who collects it writes that."""

ATTEMPT_SUFFIX_PATTERN = re.compile(r"-a[1-9][0-9]*$")


class NamedTask(BaseModel):
    """A task and its name."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    task_id: TaskId
    task_input: dict[str, Any]


class EpisodeRequest(BaseModel):
    """The body that asks for one episode."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    episode_id: EpisodeId
    task: NamedTask


def is_episode_request(body: Row) -> bool:
    """Whether *body* asks for an episode, and is no flat row."""
    return "episode_id" in body or ("task" in body and "responses_create_params" not in body)


def episode_request_to_row(request: EpisodeRequest) -> Row:
    """Give the row that *request* has played; raises `Refused` where it says two things of one field."""
    if ATTEMPT_SUFFIX_PATTERN.search(request.episode_id.rollout_id):
        raise RequestRejected(422, "`rollout_id` must not end like that of an attempt, in `-a` and a number")
    flat = dict(request.task.task_input)
    flat.pop("agent_timeout_seconds", None)
    data = flat.pop("task_data", None)
    nested = data if isinstance(data, dict) else {}
    if conflicts := sorted(key for key in flat.keys() & nested.keys() if flat[key] != nested[key]):
        raise RequestRejected(422, f"`task_input` says two things of {conflicts[0]!r}: beside `task_data`, and in it")
    return {**flat, **nested}


def agent_timeout(request: EpisodeRequest) -> float | None:
    """Give the seconds *request* allows its agent, where it does."""
    value = request.task.task_input.get("agent_timeout_seconds")
    if isinstance(value, bool) or not is_finite_number(value) or value <= 0:
        return None
    return float(value)


class Reply(Protocol):
    """How the reply to one request is written."""

    def result(self, line: Row, rollout: Rollout) -> Item:
        """Return the reply for a scored *rollout*, which is written as *line*."""

    def failure(self, failure: Failure, partial: Item | None = None) -> Item:
        """Return the reply for a rollout without a reward; *partial* is what there is of its response."""


@dataclass(frozen=True, slots=True)
class FlatReply:
    """The reply to the flat *row* of a client that routes by agent."""

    row: Row

    def result(self, line: Row, rollout: Rollout) -> Item:
        """Return the rollout's line with its `ng_trajectory`."""
        name = task_name(self.row, self.row.get(TASK_INDEX, 0))
        found = trajectory(rollout, task_id=name, rollout_id=observed_rollout_id(self.row) or rollout.id)
        return dict(line) if found is None else {**line, TRAJECTORY: found}

    def failure(self, failure: Failure, partial: Item | None = None) -> Item:
        """Return the failure under the keys that the collector copies to its failures file."""
        told = _build_failure(failure, partial)
        named = {
            "_ng_failure_class": failure.kind if failure.kind in REGISTERED_FAILURES else DEFAULT_FAILURE,
            "_ng_failure_terminal": told["terminal"],
            "_ng_failure_message": told["failure_reason"],
            "_ng_failure_stage": told.get("stage"),
            "_ng_failure_partial_response": told.get("partial_response"),
            "failure_kind": told["failure_kind"],
            "agent_ref": self.row.get("agent_ref"),
        }
        return {key: value for key, value in named.items() if value is not None}


@dataclass(frozen=True, slots=True)
class EpisodeReply:
    """The reply to an episode request, under the ids of that request."""

    request: EpisodeRequest

    def result(self, line: Row, rollout: Rollout) -> Item:
        """Return the rollout's line as the `result`, without the keys that belong to the collector.

        The collector makes the `ng_trajectory` of an episode request itself, out of the agent's observations and the
        captured model calls.
        """
        kept = {key: value for key, value in line.items() if not (key.startswith("_ng_") or key in OBSERVATION_FIELDS)}
        if found := observations(rollout, rollout_id=self.request.episode_id.key):
            kept["ng_agent_observations"] = found
        return self._named("result", kept)

    def failure(self, failure: Failure, partial: Item | None = None) -> Item:
        """Return the `failure`."""
        return self._named("failure", _build_failure(failure, partial))

    def _named(self, key: str, value: Item) -> Item:
        ids = {"episode_id": self.request.episode_id.model_dump(), "task_id": self.request.task.task_id.model_dump()}
        return {**ids, key: value}


def observed_rollout_id(row: Row) -> str | None:
    """Return the id under which NeMo Gym's collector files the observations of a flat *row*, if the row has one."""
    task, repeat, attempt = (row.get(key) for key in (TASK_INDEX, ROLLOUT_INDEX, ATTEMPT_INDEX))
    named = row.get("_ng_rollout_id", row.get("capture_rollout_id"))
    if not isinstance(named, str):
        if type(task) is not int or type(repeat) is not int:
            return None
        named = f"{task}-{repeat}"
    return f"{named}-a{attempt}" if type(attempt) is int and attempt > 0 else named


def _build_failure(failure: Failure, partial: Item | None) -> Item:
    context.add_log_fields(stage=failure.stage, kind=failure.kind)
    kind = failure.kind if failure.kind in REGISTERED_FAILURES else f"gymsdk:{_failure_name(failure.kind)}"
    told: Item = {
        "failure_reason": failure.message[:MAX_FAILURE_CHARS],
        "terminal": not failure.retryable,
        "failure_kind": kind,
    }
    stage = STAGE_NAMES.get(failure.stage)
    told |= {"stage": stage} if stage else {}
    told |= {"partial_response": partial} if partial is not None and stage != "admission" else {}
    return told


def _failure_name(kind: str) -> str:
    word = re.sub(r"[^a-z0-9_]+", "_", kind.lower()).strip("_")
    return word if word[:1].isalpha() else f"kind_{word}"


NAME_SUFFIX = "_environment_server"
"""What follows an environment's name in the name of its environment server."""


def create_app(
    environment: Playable,
    model: Model,
    *,
    name: str | None = None,
    budget: Budget | None = None,
    at_once: int = MAX_CONCURRENT_EPISODES,
    queue: int = MAX_QUEUED_EPISODES,
    figures: ServerMetrics | None = None,
) -> FastAPI:
    """Give the app of the environment server *name*: *environment* played with *model*, *at_once* episodes at most.

    *queue* more may wait for a place.
    """
    served = name or environment.name + NAME_SUFFIX
    figures = figures or ServerMetrics(served)
    runs = RunService(environment, model, budget=budget, at_once=at_once, queue=queue)
    figures.gauges["episodes_playing"] = lambda: runs.admission.taken
    figures.gauges["episodes_waiting"] = lambda: runs.admission.waiting
    ready = asyncio.Event()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with runs.open():
            ready.set()
            yield
        ready.clear()

    about = f"The environment server of {environment.name}: it plays flat rows and episode requests."
    made = bare(served, about, figures=figures, ready=ready.is_set, lifespan=lifespan)
    server = EnvironmentEndpoints(runs)
    either = {"anyOf": [EpisodeRequest.model_json_schema(), FLAT_ROW_SCHEMA]}
    either["$defs"] = either["anyOf"][0].pop("$defs")
    made.add_api_route("/run", server.run, methods=["POST"], **document_endpoint(either))
    made.add_api_route("/aggregate_metrics", server.aggregate, methods=["POST"], **document_endpoint(AGGREGATE_SCHEMA))
    return made


class EnvironmentEndpoints:
    """The endpoints of an environment server that plays by *runs*."""

    def __init__(self, runs: RunService) -> None:
        self._runs = runs

    async def run(self, request: Request) -> Response:
        """Play a flat row or an episode request.

        A request that names its rollout is played once, even if it arrives more than once. A rollout without a reward
        is HTTP 200, as NeMo Gym's own environment servers answer: any other status ends the client's collection.
        """
        try:
            asked = await read_json_object(request)
        except ServerOverloaded as error:
            return json_response(FlatReply({}).failure(_rejection_to_failure(error)))
        episode = parse_body(EpisodeRequest, asked) if is_episode_request(asked) else None
        reply: Reply = EpisodeReply(episode) if episode else FlatReply(asked)
        try:
            order = (
                self._parse_episode_request(episode)
                if episode
                else self._parse_flat_row(asked, rollout_id_of(request.scope))
            )
            return _json_bytes_response(
                await cancel_on_disconnect(request, self._runs.play_once(order, asked, reply.result))
            )
        except RolloutFailed as lost:
            return json_response(reply.failure(lost.failure, lost.rollout.response))
        except UsageError as error:
            return json_response(reply.failure(Failure(stage="reset", kind="bad_row", message=str(error))))
        except RequestRejected as error:
            return json_response(reply.failure(_rejection_to_failure(error)))

    async def aggregate(self, request: Request) -> Response:
        """Give the figures over verified rows."""
        return json_response(await self._runs.aggregate(await read_json_object(request)))

    def _parse_flat_row(self, row: Row, rollout: str | None) -> RowRequest:
        found = parse_row_request(row, self._runs.environment, rollout=rollout)
        return replace(found, id=observed_rollout_id(row) or found.id)

    def _parse_episode_request(self, episode: EpisodeRequest) -> RowRequest:
        found = parse_row_request(
            episode_request_to_row(episode), self._runs.environment, rollout=episode.episode_id.key
        )
        seconds = agent_timeout(episode)
        if seconds is None:
            return found
        budget: Budget = found.budget or self._runs.budget
        return replace(found, budget=budget.model_copy(update={"seconds": seconds}))


def _rejection_to_failure(error: RequestRejected) -> Failure:
    fields = {"stage": "reset", "kind": "bad_row", "message": str(error)} | error.fields
    return Failure.model_validate({key: value for key, value in fields.items() if key in Failure.model_fields})


def _json_bytes_response(text: bytes) -> Response:
    return Response(text, media_type="application/json")
