"""The rules by which every reader takes the reward and the indices from a rollout's line or from a server's answer."""

from __future__ import annotations

import hashlib
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

from gymsdk.jsonl import dump_canonical_json, is_finite_number
from gymsdk.types import Outcome, Row

MASK, FAILURE_CLASS, SKIPPED = "mask_sample", "_ng_failure_class", "verification_skipped"
"""The fields by which NeMo Gym says that a reward does not count."""

MASK_FIELDS = frozenset({MASK, SKIPPED})
"""Those of them that a run adds to a row under a name without a prefix."""

TRAJECTORY = "ng_trajectory"
"""The key of NeMo Gym's trajectory on the line of a rollout."""

RESULT_FIELDS = frozenset({"response", "reward", "reward_components", TRAJECTORY, "gymsdk"})
"""The keys that a run adds to a row. They are removed before the row is played again."""

ATTEMPT_INDEX = "_ng_attempt_index"
"""The key of NeMo Gym's index of the attempt."""

TASK_DIGEST = "task_digest"
"""The field of a line's `gymsdk` key that identifies the task: equal rows have equal digests in every run."""

ABSENT_OUTCOMES: tuple[Outcome, ...] = ("failed", "unscorable")
"""The outcomes of rollouts without a reward."""

MAX_INDEX = 2**63 - 1
"""The largest index of a task or a repeat that the index of a run stores."""

MAX_SHOWN_CHARS = 200

NOTHING: Mapping[str, Any] = {}


@dataclass(frozen=True, slots=True)
class NoReward:
    """Why a line has no reward.

    Attributes:
        outcome: `failed` or `unscorable`.
        kind: The kind of the failure.
        message: The reason.
        stage: The stage that failed.
        is_declared: Whether the line itself says that its reward does not count; otherwise the reward is not a number.
    """

    outcome: Outcome
    kind: str
    message: str
    stage: str = "verify"
    is_declared: bool = True


def read_reward(line: Row, row: Mapping[str, Any] = NOTHING) -> float | None:
    """Return the reward of a line, or `None` if it has none: this is the only rule for what counts as a reward.

    A line that is masked, whose verification was skipped, that failed, or whose reward is not a finite number has no
    reward. `true` is 1.0 and `false` is 0.0, as in NeMo Gym.

    Args:
        line: A line of `rollouts.jsonl` or `failures.jsonl`, of NeMo Gym's files, or an answer of `/run` or `/verify`.
        row: The row that the server answers to, whose fields it may return.
    """
    return None if find_no_reward(line, row) is not None else float(line["reward"])


def find_no_reward(line: Row, row: Mapping[str, Any] = NOTHING) -> NoReward | None:
    """Return why a line has no reward, or `None` if it has one; the arguments are those of `read_reward`."""
    stored = _get_host_fields(line).get("outcome")
    # A foreign outcome may be a list, which has no hash.
    outcome: Outcome | None = next((name for name in ABSENT_OUTCOMES if name == stored), None)
    declared = _find_declaration(line, row)
    if declared is not None or outcome is not None:
        return _describe_declaration(line, declared, outcome or "unscorable")
    reward = line.get("reward")
    if is_finite_number(reward):
        return None
    return NoReward("failed", "bad_answer", f"the verdict has no numeric reward: {_show(reward)}", is_declared=False)


def is_gymsdk_result(body: Row) -> bool:
    """Return whether gymsdk verified the row *body*; a `gymsdk` field without a verdict comes from the request."""
    host_fields = _get_host_fields(body)
    return isinstance(host_fields.get("verdict"), list) and "outcome" in host_fields


def read_index(line: Row, key: str, default: int) -> int:
    """Return the index *key* of a line, or *default* if it is missing or is not a whole number of 64 bits.

    The default of a task's index is the number of the line in its file, from 0.
    """
    index = line.get(key)
    return index if type(index) is int and abs(index) <= MAX_INDEX else default


def strip_results(row: Row, *, keep: Container[str] = ()) -> Row:
    """Return *row* without the keys that an earlier run wrote, including verdict fields; *keep* names exceptions."""
    host_fields = row.get("gymsdk")
    names = host_fields.get("verdict") if isinstance(host_fields, dict) else None
    stale = RESULT_FIELDS.union(map(str, names if isinstance(names, list) else ()), MASK_FIELDS, {ATTEMPT_INDEX})
    return {
        key: value for key, value in row.items() if key in keep or not (key in stale or key.startswith("_ng_failure_"))
    }


def compute_task_digest(row: Row, environment: str) -> str:
    """Return a digest that equal tasks of two runs share: it depends on neither their numbers nor the sampling.

    Args:
        row: The row as it was sent. The line of a rollout gives another digest if `reset` has added messages to it.
        environment: The name of the environment.
    """
    bare = {
        key: value for key, value in strip_results(row).items() if not key.startswith("_ng_") and key != "agent_ref"
    }
    params = row.get("responses_create_params")
    prompt = params.get("input") if isinstance(params, dict) else None
    content = bare | {"responses_create_params": {"input": prompt}, "environment": environment}
    return hashlib.blake2b(dump_canonical_json(content), digest_size=12).hexdigest()


def compute_line_digest(line: Row, environment: str) -> str:
    """Return what identifies the task of a line if the row as sent is not known.

    The line of another program does not tell which of its fields the verdict has added, so that only the prompt counts.
    """
    is_own = "outcome" in _get_host_fields(line)
    params = {"responses_create_params": line.get("responses_create_params")}
    return compute_task_digest(line if is_own else params, environment)


def _get_host_fields(line: Row) -> Mapping[str, Any]:
    host_fields = line.get("gymsdk")
    return host_fields if isinstance(host_fields, dict) else NOTHING


def _find_declaration(line: Row, row: Mapping[str, Any]) -> str | None:
    """Return the field that says that the reward does not count, or `None`."""
    fields = [name for name in (MASK, FAILURE_CLASS, SKIPPED) if name in line and _is_set(name, line[name])]
    if fields and is_gymsdk_result(line):
        # gymsdk writes such fields only in a failure; others belong to the environment's verdict, or to its row.
        names = line["gymsdk"]["verdict"]
        fields = [name for name in fields if name not in names and not (name in row and row[name] == line[name])]
    return fields[0] if fields else None


def _is_set(name: str, value: object) -> bool:
    # Tables write `true` as 1. Other values of the mask are fields of an environment with the same name.
    return value == 1 if name == MASK else bool(value)


def _describe_declaration(line: Row, declared: str | None, outcome: Outcome) -> NoReward:
    default_kind = "verification_skipped" if declared == SKIPPED else "judge_failed" if declared == MASK else "unknown"
    # A line of gymsdk has the class only; its row may have fields with the other names.
    kinds, reasons = [FAILURE_CLASS], ["_ng_failure_judge_error", "_ng_failure_message"]
    if "outcome" not in _get_host_fields(line):
        kinds, reasons = ["failure_kind", *kinds], ["failure_reason", *reasons]
    kind = str(next(filter(None, map(line.get, kinds)), default_kind))
    reason = next(filter(None, map(line.get, reasons)), f"the server gives no reward: {kind}")
    return NoReward(outcome, kind, str(reason), str(line.get("_ng_failure_stage") or "verify"))


def _show(reward: object) -> str:
    if isinstance(reward, int):
        # Python does not convert the longest integers to text.
        return "an integer beyond the range of a double"
    return str(reward)[:MAX_SHOWN_CHARS]
