"""A rollout as a line of JSONL: the row it came from, the fields NeMo Gym writes, ours under `gymsdk`."""

from __future__ import annotations

import math
from collections.abc import Container
from typing import Any

from pydantic import ConfigDict

from gymsdk.metrics import ROLLOUT_INDEX, TASK_INDEX
from gymsdk.outcome import Failure, Rollout, Timing
from gymsdk.plugins.answers import STEPS
from gymsdk.rollouts.jobs import Key
from gymsdk.types import Row, Verdict
from gymsdk.usage import Usage

TRAJECTORY = "ng_trajectory"
"""The key of NeMo Gym's trajectory on a rollout's line."""

WRITTEN = frozenset({"response", "reward", "reward_components", TRAJECTORY, "gymsdk"})
"""What a line says of how its row was played: from a row that was played before it is out of date."""

ATTEMPT_INDEX = "_ng_attempt_index"
"""The stamp NeMo Gym numbers the tries of a failed rollout with."""

AGAIN = frozenset({"judge_failed", "host_broke", "threads_exhausted"})
"""Failures beyond the model's own that lie with the run's set-up or its host, and may be gone by a resume."""

LOST = frozenset({"worker_killed", "worker_timeout", "worker_start"})
"""Failures that in `verify` may lie with the answer: playing on until it is a lighter one would choose the rewards."""


class StoredVerdict(Verdict):
    """A verdict read back from its line: its own fields as plain JSON."""

    model_config = ConfigDict(frozen=True, extra="allow")


def unplayed(row: Row, *, keep: Container[str] = ()) -> Row:
    """Give *row* without what an earlier play wrote on it, its verdict's own fields too, but for those to *keep*."""
    ours = row.get("gymsdk")
    names = ours.get("verdict") if isinstance(ours, dict) else None
    stale = WRITTEN.union(map(str, names if isinstance(names, list) else ()), {ATTEMPT_INDEX})
    return {
        key: value for key, value in row.items() if key in keep or not (key in stale or key.startswith("_ng_failure_"))
    }


def scored(rollout: Rollout, key: Key, *, attempts: int = 1) -> Row:
    """Give the line of a scored rollout.

    The verdict's fields stand flat beside the row's; `reward_components` is there where there are components. Raises
    `ValueError` if the reward is not finite: JSON has no such number, and the line would have no reward.
    """
    if rollout.reward is None or not math.isfinite(rollout.reward):
        raise ValueError(f"the reward of a scored rollout must be a finite number, not {rollout.reward}")
    verdict: dict[str, Any] = {}
    if rollout.verdict is not None:
        verdict = rollout.verdict.model_dump(mode="json", exclude={"reward", "components"})
    components = {"reward_components": rollout.components} if rollout.components else {}
    ours = _ours(rollout, attempts) | {"verdict": list(verdict)}
    return {**_played(rollout), **verdict, "reward": rollout.reward, **components, **_stamps(key), "gymsdk": ours}


def failed(rollout: Rollout, key: Key, *, attempts: int) -> Row:
    """Give the line of a rollout without a reward: what failed, where, and what there is of the response.

    It is terminal where a resume is to leave it as it is.
    """
    failure = rollout.failure or Failure(stage="", kind="unknown", message="")
    told = {
        "_ng_failure_class": failure.kind,
        "_ng_failure_stage": failure.stage,
        "_ng_failure_message": failure.message,
        "_ng_failure_terminal": _terminal(failure),
        ATTEMPT_INDEX: attempts - 1,
    }
    ours = _ours(rollout, attempts) | {"retryable": failure.retryable}
    return {**_played(rollout), **told, **_stamps(key), "gymsdk": ours}


def _terminal(failure: Failure) -> bool:
    """Give whether neither another try nor a run set up rightly can help, or ought to."""
    if failure.stage == "verify" and failure.kind in LOST:
        return True
    return not (failure.retryable or failure.stage == "model" or failure.kind in AGAIN)


def key_of(line: Row) -> Key:
    """Give a line's place in its run."""
    return line[TASK_INDEX], line[ROLLOUT_INDEX]


def read(line: Row) -> Rollout:
    """Give the scored rollout written on *line*, its verdict's own fields as plain JSON."""
    ours = line["gymsdk"]
    fields = {name: line[name] for name in ours["verdict"] if name in line}
    components = line.get("reward_components", {})
    judged = {name: value for name, value in components.items() if name != STEPS}
    params = line["responses_create_params"]
    return Rollout(
        id=ours["id"],
        rollout_id=ours.get("rollout_id", ""),
        environment=ours["environment"],
        row={key: value for key, value in line.items() if key not in WRITTEN},
        seed=ours["seed"],
        repeat=line[ROLLOUT_INDEX],
        outcome="scored",
        ended=ours["ended"],
        opening=params["input"],
        tools=params.get("tools", []),
        response=line["response"],
        reward=line["reward"],
        components=components,
        verdict=StoredVerdict(
            **{"reward": line["reward"] - components.get(STEPS, 0.0), "components": judged, **fields}
        ),
        turns=ours["turns"],
        usage={role: Usage(**used) for role, used in ours["usage"].items()},
        timing=Timing(**ours["timing"]),
    )


def _played(rollout: Rollout) -> Row:
    row = unplayed(rollout.row)
    own = row.get("responses_create_params", {})
    params = {**own, **rollout.sampling, "input": rollout.opening or own.get("input", [])}
    params |= {"tools": rollout.tools} if rollout.tools else {}
    return {**row, "responses_create_params": params, "response": rollout.response}


def _stamps(key: Key) -> Row:
    return {TASK_INDEX: key[0], ROLLOUT_INDEX: key[1]}


def _ours(rollout: Rollout, attempts: int) -> Row:
    kept = {"id", "environment", "seed", "outcome", "ended", "turns", "usage", "timing"}
    kept |= {"rollout_id"} if rollout.rollout_id else set()
    return rollout.model_dump(mode="json", include=kept) | {"attempts": attempts}
