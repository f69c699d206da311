"""The episode protocol of NeMo Gym 0.7: a request that names its rollout and task, a response with one or the other.

Whatever happens to an episode, the response is HTTP 200: its result, or why there is none.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, ConfigDict

from gymsdk import trail
from gymsdk.outcome import Failure
from gymsdk.servers.app import Refused
from gymsdk.servers.wire.bodies import EpisodeId, TaskId
from gymsdk.transcript import Item
from gymsdk.types import Row

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
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        return None
    return float(value)


def succeeded(request: EpisodeRequest) -> Callable[[Row], Item]:
    """Give what makes a rollout's line the response to *request*."""
    return lambda line: _response(request, "result", _result(line))


def failed(request: EpisodeRequest, failure: Failure, partial: Item | None = None) -> Item:
    """Give the response to *request* that has a failure for its result."""
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
    return _response(request, "failure", told)


def _response(request: EpisodeRequest, key: str, value: Item) -> Item:
    ids = {"episode_id": request.episode_id.model_dump(), "task_id": request.task.task_id.model_dump()}
    return {**ids, key: value}


def _result(line: Row) -> Item:
    return {key: value for key, value in line.items() if not (key.startswith("_ng_") or key in OBSERVED)}


def _word(kind: str) -> str:
    word = re.sub(r"[^a-z0-9_]+", "_", kind.lower()).strip("_")
    return word if word[:1].isalpha() else f"kind_{word}"
