"""The protocol of NeMo Gym 0.7's environment servers: flat rows and episode requests, and the replies to both.

A reply is HTTP 200 whether the episode has a reward or not. A failure never has a `reward` key: the collector writes
it to its failures file and continues.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict

from gymsdk import trail
from gymsdk.metrics import ROLLOUT_INDEX, TASK_INDEX
from gymsdk.outcome import Failure, Rollout
from gymsdk.rollouts.lines import ATTEMPT_INDEX, TRAJECTORY
from gymsdk.rollouts.trajectory import observations, task_name, trajectory
from gymsdk.servers.app import Refused
from gymsdk.servers.wire.bodies import EpisodeId, TaskId
from gymsdk.transcript import Item
from gymsdk.types import Row
from gymsdk.values import is_finite

LONGEST = 2000
"""Characters a failure's reason may have."""

STAGES = {
    "admission": "admission",
    "reset": "seed",
    "model": "agent",
    "step": "agent",
    "verify": "verification",
    "close": "cleanup",
}
"""What the stages of an episode are called there."""

REGISTERED = frozenset({"judge_failed", "judge_unparseable"})
"""The kinds of failure that have the same name there; others are ours, and say so."""

UNNAMED = "environment_server_failed"
"""The class of every other failure in the collector's failures file."""

OBSERVED = frozenset({"ng_trajectory", "ng_model_call_capture", "ng_perf", "ng_agent_observations"})
"""What a result may not hold, beside whatever begins with `_ng_`: who collects it writes that."""

TRIED = re.compile(r"-a[1-9][0-9]*$")


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


def is_episode(body: Row) -> bool:
    """Whether *body* asks for an episode, and is no flat row."""
    return "episode_id" in body or ("task" in body and "responses_create_params" not in body)


def row(request: EpisodeRequest) -> Row:
    """Give the row that *request* has played; raises `Refused` where it says two things of one field."""
    if TRIED.search(request.episode_id.rollout_id):
        raise Refused(422, "`rollout_id` must not end like that of an attempt, in `-a` and a number")
    flat = dict(request.task.task_input)
    flat.pop("agent_timeout_seconds", None)
    data = flat.pop("task_data", None)
    nested = data if isinstance(data, dict) else {}
    if conflicts := sorted(key for key in flat.keys() & nested.keys() if flat[key] != nested[key]):
        raise Refused(422, f"`task_input` says two things of {conflicts[0]!r}: beside `task_data`, and in it")
    return {**flat, **nested}


def seconds(request: EpisodeRequest) -> float | None:
    """Give the seconds *request* allows its agent, where it does."""
    value = request.task.task_input.get("agent_timeout_seconds")
    if isinstance(value, bool) or not is_finite(value) or value <= 0:
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
        found = trajectory(rollout, task_id=name, rollout_id=rollout_id(self.row) or rollout.id)
        return dict(line) if found is None else {**line, TRAJECTORY: found}

    def failure(self, failure: Failure, partial: Item | None = None) -> Item:
        """Return the failure under the keys that the collector copies to its failures file."""
        told = _failure(failure, partial)
        named = {
            "_ng_failure_class": failure.kind if failure.kind in REGISTERED else UNNAMED,
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
        kept = {key: value for key, value in line.items() if not (key.startswith("_ng_") or key in OBSERVED)}
        if found := observations(rollout, rollout_id=self.request.episode_id.key):
            kept["ng_agent_observations"] = found
        return self._named("result", kept)

    def failure(self, failure: Failure, partial: Item | None = None) -> Item:
        """Return the `failure`."""
        return self._named("failure", _failure(failure, partial))

    def _named(self, key: str, value: Item) -> Item:
        ids = {"episode_id": self.request.episode_id.model_dump(), "task_id": self.request.task.task_id.model_dump()}
        return {**ids, key: value}


def rollout_id(row: Row) -> str | None:
    """Return the id under which NeMo Gym's collector files the observations of a flat *row*, if the row has one."""
    task, repeat, attempt = (row.get(key) for key in (TASK_INDEX, ROLLOUT_INDEX, ATTEMPT_INDEX))
    named = row.get("_ng_rollout_id", row.get("capture_rollout_id"))
    if not isinstance(named, str):
        if type(task) is not int or type(repeat) is not int:
            return None
        named = f"{task}-{repeat}"
    return f"{named}-a{attempt}" if type(attempt) is int and attempt > 0 else named


def _failure(failure: Failure, partial: Item | None) -> Item:
    trail.tell(stage=failure.stage, kind=failure.kind)
    kind = failure.kind if failure.kind in REGISTERED else f"gymsdk:{_word(failure.kind)}"
    told: Item = {
        "failure_reason": failure.message[:LONGEST],
        "terminal": not failure.retryable,
        "failure_kind": kind,
    }
    stage = STAGES.get(failure.stage)
    told |= {"stage": stage} if stage else {}
    told |= {"partial_response": partial} if partial is not None and stage != "admission" else {}
    return told


def _word(kind: str) -> str:
    word = re.sub(r"[^a-z0-9_]+", "_", kind.lower()).strip("_")
    return word if word[:1].isalpha() else f"kind_{word}"
