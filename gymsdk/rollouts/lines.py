"""A rollout as a line of JSONL: the row it came from, the fields NeMo Gym writes, ours under `gymsdk`."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict

from gymsdk.outcome import Failure, Rollout, Timing
from gymsdk.plugins.answers import STEPS
from gymsdk.rollouts.jobs import ROLLOUT_INDEX, TASK_INDEX, Key
from gymsdk.types import Row, Verdict
from gymsdk.usage import Usage

WRITTEN = frozenset({"response", "reward", "reward_components", "gymsdk"})
"""What a line says of how its row was played: from a row that was played before it is out of date."""

AGAIN = frozenset({"judge_failed"})
"""Failures beyond the model's own that lie with how the run is set up, which its user may have mended by a resume."""


class StoredVerdict(Verdict):
    """A verdict read back from its line: its own fields as plain JSON."""

    model_config = ConfigDict(frozen=True, extra="allow")


def scored(rollout: Rollout, key: Key) -> Row:
    """Give the line of a scored rollout.

    The verdict's fields stand flat beside the row's; `reward_components` is there where there are components.
    """
    verdict: dict[str, Any] = {}
    if rollout.verdict is not None:
        verdict = rollout.verdict.model_dump(mode="json", exclude={"reward", "components"})
    components = {"reward_components": rollout.components} if rollout.components else {}
    ours = _ours(rollout) | {"verdict": list(verdict)}
    return {**_played(rollout), **verdict, "reward": rollout.reward, **components, **_stamps(key), "gymsdk": ours}


def failed(rollout: Rollout, key: Key, *, attempts: int) -> Row:
    """Give the line of a rollout without a reward: what failed, where, and what there is of the response.

    It is terminal where neither another try nor a model set up rightly can help.
    """
    failure = rollout.failure or Failure(stage="", kind="unknown", message="")
    again = failure.retryable or failure.stage == "model" or failure.kind in AGAIN
    told = {
        "_ng_failure_class": failure.kind,
        "_ng_failure_stage": failure.stage,
        "_ng_failure_message": failure.message,
        "_ng_failure_terminal": not again,
        "_ng_attempt_index": attempts - 1,
    }
    return {**_played(rollout), **told, **_stamps(key), "gymsdk": _ours(rollout)}


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
    row = {key: value for key, value in rollout.row.items() if key not in WRITTEN and not key.startswith("_ng_failure")}
    own = row.get("responses_create_params", {})
    params = {**own, **rollout.sampling, "input": rollout.opening or own.get("input", [])}
    params |= {"tools": rollout.tools} if rollout.tools else {}
    return {**row, "responses_create_params": params, "response": rollout.response}


def _stamps(key: Key) -> Row:
    return {TASK_INDEX: key[0], ROLLOUT_INDEX: key[1]}


def _ours(rollout: Rollout) -> Row:
    kept = {"id", "environment", "seed", "outcome", "ended", "turns", "usage", "timing"}
    return rollout.model_dump(mode="json", include=kept)
