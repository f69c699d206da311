"""A stored or verified rollout: the only module that knows the keys that a line has beside those of its row.

A line stands in `rollouts.jsonl` or `failures.jsonl`, in NeMo Gym's files, or in an answer of `/run` or `/verify`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import orjson
from pydantic import ConfigDict

from gymsdk import __version__, jsonl, responses
from gymsdk.episode_record import RECORD_FIELDS, EpisodeRecord
from gymsdk.errors import BadRow
from gymsdk.jsonl import is_finite_number
from gymsdk.types import AGENT_SUFFIX, STEPS_COMPONENT, Failure, Item, Outcome, Rollout, Row, Timing, Usage, Verdict
from gymsdk.working_folder import shorten_path

FORMAT = 1
"""The format of the lines that this version writes. Raise it when a reader of today would misread a line."""

TASK_INDEX, ROLLOUT_INDEX = "_ng_task_index", "_ng_rollout_index"
"""The fields in which NeMo Gym numbers tasks and the rollouts of each task."""

ATTEMPT_INDEX = "_ng_attempt_index"
"""The key of NeMo Gym's index of the attempt."""

HOST = "gymsdk"
"""The key with gymsdk's own fields of a rollout."""

FAILURE_PREFIX = "_ng_failure_"

MASK, FAILURE_CLASS, SKIPPED = "mask_sample", FAILURE_PREFIX + "class", "verification_skipped"
"""The fields by which NeMo Gym says that a reward does not count."""

MASK_FIELDS = frozenset({MASK, SKIPPED})
"""Those of them that a run adds to a row under a name without a prefix."""

TRAJECTORY = "ng_trajectory"
"""The key of NeMo Gym's trajectory on the line of a rollout."""

RESULT_FIELDS = frozenset({"response", "reward", "reward_components", TRAJECTORY, HOST})
"""The keys that a run adds to a row. They are removed before the row is played again."""

TASK_DIGEST = "task_digest"
"""The field of a line's `gymsdk` key that identifies the task: equal rows have equal digests in every run."""

STORED_REWARD = "stored_reward"
"""The field of a line's `gymsdk` key with the reward before `gymsdk reverify`."""

SCALAR_FIELDS = ("id", "rollout_id", "environment", "seed", "outcome", "ended", "turns")
"""The fields of a rollout that its line holds unchanged."""

ABSENT_OUTCOMES: tuple[Outcome, ...] = ("failed", "unscorable")
"""The outcomes of rollouts without a reward."""

RESUMABLE_KINDS = frozenset({"judge_failed", "host_broke", "threads_exhausted"})
"""Failure kinds outside the model that may not occur again when the run is resumed."""

WORKER_FAILURE_KINDS = frozenset({"worker_killed", "worker_timeout", "worker_start"})
"""Failure kinds that the answer may cause in `verify`. Further attempts would select answers by their reward."""

MAX_INDEX = 2**63 - 1
"""The largest index of a task or a repeat that the index of a run stores."""

MAX_SHOWN_CHARS = 200

NOTHING: Mapping[str, Any] = {}

Key: TypeAlias = tuple[int, int]
"""The position of a rollout in its run: the index of the task and of the repeat."""


class StoredVerdict(Verdict):
    """A verdict read from a line, with the environment's own fields as JSON values."""

    model_config = ConfigDict(frozen=True, extra="allow")


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


UNNAMED_FAILURE = NoReward("failed", "", "", "")
"""The reason of a line in the file of failures that gives none."""


class StoredRollout:
    """A line, whose fields are parsed when a reader needs them.

    Args:
        line: The line.
        number: The number of the line in its file, from 0; it stands for a missing index of the task.
        sent: The row as it was sent, if it is known.
        is_failure: Whether the line is from the file of failures.
        where: The file and the number of the line, for the error.

    Raises:
        BadRow: A later version of gymsdk wrote the line in a newer format.
    """

    __slots__ = ("_host", "is_failure", "line", "number", "sent")

    def __init__(
        self, line: Row, *, number: int = 0, sent: Row | None = None, is_failure: bool = False, where: str = ""
    ) -> None:
        host = line.get(HOST)
        self._host: Mapping[str, Any] = host if isinstance(host, dict) else NOTHING
        self.line = line
        self.number = number
        self.sent = sent
        self.is_failure = is_failure
        if "format" in self._host:
            _check_format(self._host, where)

    @property
    def task(self) -> int:
        """The index of the task in the run; the number of the line if the line has no index."""
        return read_index(self.line, TASK_INDEX, self.number)

    @property
    def repeat(self) -> int:
        """The index of the repeat."""
        return read_index(self.line, ROLLOUT_INDEX, 0)

    @property
    def key(self) -> Key:
        """The position in the run."""
        return self.task, self.repeat

    @property
    def id(self) -> str:
        """The id of the rollout in its run."""
        return str(self._host.get("id") or f"{self.task}:{self.repeat}")

    @property
    def agent(self) -> str | None:
        """The agent that the row names, or `None`."""
        return get_agent_name(self.line)

    @property
    def environment(self) -> str:
        """The name of the environment; empty if the line names none."""
        name = self._host.get("environment")
        return name if name and isinstance(name, str) else get_environment_name(self.line) or ""

    @property
    def has_host_fields(self) -> bool:
        """Whether the line has fields of gymsdk, which may be those of a request."""
        return bool(self._host)

    @property
    def is_own(self) -> bool:
        """Whether gymsdk played or verified the row; fields without an outcome come from the request."""
        return "outcome" in self._host

    @property
    def is_verified(self) -> bool:
        """Whether gymsdk verified the row, so that the line lists the fields of its verdict."""
        return isinstance(self._host.get("verdict"), list) and self.is_own

    @property
    def ended(self) -> Any:
        """Why the episode ended, `None` if it did not."""
        return self._host.get("ended")

    @property
    def turns(self) -> Any:
        """The number of turns of the policy, `None` if the line does not say it."""
        return self._host.get("turns")

    @property
    def seed(self) -> int | None:
        """The seed of the episode."""
        seed = self._host.get("seed")
        return seed if type(seed) is int else None

    @property
    def digest(self) -> str | None:
        """What identifies the task in every run."""
        digest = self._host.get(TASK_DIGEST)
        return digest if isinstance(digest, str) else None

    @property
    def stored_reward(self) -> Any:
        """The reward before `gymsdk reverify`."""
        return self._host.get(STORED_REWARD)

    @property
    def usage(self) -> dict[str, dict[str, int]]:
        """The token usage by role."""
        return get_object(self._host, "usage")

    @property
    def policy_usage(self) -> Item:
        """The token usage of the policy, or else that of the response."""
        return get_object(self.usage, "policy") or get_object(self.response, "usage")

    @property
    def timing(self) -> Item:
        """The times of the episode, in milliseconds."""
        return get_object(self._host, "timing")

    @property
    def stages(self) -> dict[str, float]:
        """The times of the episode's stages, in milliseconds."""
        return get_object(self.timing, "stages")

    @property
    def record(self) -> EpisodeRecord:
        """The rewards of the steps, and the calls of judges and user models."""
        return parse_record(self._host)

    @property
    def params(self) -> Item:
        """The prompt, the tools and the sampling parameters."""
        return get_object(self.line, "responses_create_params")

    @property
    def opening(self) -> list[Item]:
        """The items that the policy saw before its first turn."""
        given = self.params.get("input")
        if isinstance(given, str):
            return [{"role": "user", "content": given}]
        return [item for item in given if isinstance(item, dict)] if isinstance(given, list) else []

    @property
    def response(self) -> Item:
        """The policy's response; empty without one."""
        return get_object(self.line, "response")

    @property
    def output(self) -> list[Item]:
        """The items of the episode: those of the policy, and those of the environment."""
        output = self.response.get("output")
        return [item for item in output if isinstance(item, dict)] if isinstance(output, list) else []

    @property
    def row(self) -> Row:
        """The row that was played.

        If only the line is known, the fields of its verdict stay: the row may have fields of the same names.
        """
        if self.sent is not None:
            return self.sent
        return _strip(self.line, RESULT_FIELDS | MASK_FIELDS | {ATTEMPT_INDEX})

    # The verdict

    @property
    def reward(self) -> float | None:
        """The reward, or `None` without one; see `find_no_reward`."""
        return None if self.find_no_reward() is not None else float(self.line["reward"])

    @property
    def components(self) -> dict[str, Any]:
        """The parts of the reward."""
        return get_object(self.line, "reward_components")

    @property
    def verdict_names(self) -> list[str] | None:
        """The names of the fields that belong to the verdict, `None` if the line does not list them."""
        names = self._host.get("verdict")
        return (
            [name for name in names if isinstance(name, str) and name in self.line] if isinstance(names, list) else None
        )

    @property
    def verdict(self) -> Row:
        """The fields of the verdict that the line lists, without the reward."""
        return {name: self.line[name] for name in self.verdict_names or ()}

    @property
    def outcome(self) -> str:
        """`scored`, `unscorable` or `failed`."""
        absent = self.find_no_reward()
        if absent is None:
            return "scored"
        stored = self._host.get("outcome")
        return absent.outcome if stored is None or stored == "scored" else str(stored)

    @property
    def failure(self) -> tuple[str, str, str]:
        """The kind, the stage and the message of the failure; a line of the file of failures may lack some of them."""
        if self.is_failure:
            kind, stage, message = (
                str(self.line.get(FAILURE_PREFIX + name) or "") for name in ("class", "stage", "message")
            )
            if kind:
                return kind, stage, message
            # An empty class counts as `unknown`, as in the metrics.
            absent = self.find_no_reward()
            return absent.kind if absent is not None else "", stage, message
        absent = self.find_no_reward()
        return ("", "", "") if absent is None else (absent.kind, absent.stage, absent.message)

    @property
    def terminal(self) -> bool | None:
        """Whether the line says that a resume must not repeat the rollout; `None` if it does not say it."""
        terminal = self.line.get(FAILURE_PREFIX + "terminal")
        return None if terminal is None else bool(terminal)

    @property
    def is_retryable(self) -> bool:
        """Whether another attempt may succeed. A line of an earlier version does not say it."""
        return bool(self._host.get("retryable", True))

    def find_no_reward(self, row: Mapping[str, Any] = NOTHING) -> NoReward | None:
        """Return why the line has no reward, or `None` if it has one: the only rule for what counts as a reward.

        A line has no reward if it is masked, if its verification was skipped, if it failed, or if the reward is not a
        finite number. `true` is 1.0 and `false` is 0.0, as in NeMo Gym.

        Args:
            row: The row that the server answers to. The answer may contain its fields.
        """
        stored = self._host.get("outcome")
        # A foreign outcome may be a list, which has no hash.
        outcome: Outcome | None = next((name for name in ABSENT_OUTCOMES if name == stored), None)
        declared = self._find_declaration(row)
        if declared is not None or outcome is not None:
            return self._describe_declaration(declared, outcome)
        if self.is_failure:
            return UNNAMED_FAILURE
        reward = self.line.get("reward")
        if is_finite_number(reward):
            return None
        return NoReward(
            "failed", "bad_answer", f"the verdict has no numeric reward: {_show(reward)}", is_declared=False
        )

    def _find_declaration(self, row: Mapping[str, Any]) -> str | None:
        """Return the field that says that the reward does not count, or `None`."""
        line = self.line
        fields = [name for name in (MASK, FAILURE_CLASS, SKIPPED) if name in line and _is_set(name, line[name])]
        if fields and self.is_verified:
            # gymsdk writes such fields only in a failure; others belong to the environment's verdict, or to its row.
            names = self.verdict_names or ()
            fields = [name for name in fields if name not in names and not (name in row and row[name] == line[name])]
        return fields[0] if fields else None

    def _describe_declaration(self, declared: str | None, outcome: Outcome | None) -> NoReward:
        default = "verification_skipped" if declared == SKIPPED else "judge_failed" if declared == MASK else "unknown"
        # A line of gymsdk has the class only; its row may have fields with the other names.
        kinds, reasons = [FAILURE_CLASS], [FAILURE_PREFIX + "judge_error", FAILURE_PREFIX + "message"]
        if not self.is_own:
            kinds, reasons = ["failure_kind", *kinds], ["failure_reason", *reasons]
        kind = str(next(filter(None, map(self.line.get, kinds)), default))
        reason = next(filter(None, map(self.line.get, reasons)), f"the server gives no reward: {kind}")
        stage = str(self.line.get(FAILURE_PREFIX + "stage") or "verify")
        return NoReward(outcome or ("failed" if self.is_failure else "unscorable"), kind, str(reason), stage)

    # Other forms

    def to_rollout(self) -> Rollout:
        """Return the scored rollout on a line of gymsdk, with the verdict's own fields as JSON values.

        Raises:
            KeyError, TypeError, ValidationError: gymsdk did not write the line.
        """
        line, host, reward = self.line, self._host, float(self.line["reward"])
        components = line.get("reward_components", {})
        own = {name: value for name, value in components.items() if name != STEPS_COMPONENT}
        verdict = {"reward": reward - components.get(STEPS_COMPONENT, 0.0), "components": own, **self.verdict}
        params = line["responses_create_params"]
        return Rollout(
            id=host["id"],
            rollout_id=host.get("rollout_id", ""),
            environment=host["environment"],
            row={key: value for key, value in line.items() if key not in RESULT_FIELDS},
            seed=host["seed"],
            repeat=line[ROLLOUT_INDEX],
            outcome="scored",
            ended=host["ended"],
            opening=params["input"],
            tools=params.get("tools", []),
            response=line["response"],
            reward=reward,
            components=components,
            verdict=StoredVerdict(**verdict),
            turns=host["turns"],
            usage={role: Usage(**usage) for role, usage in host["usage"].items()},
            timing=Timing(**host["timing"]),
            record=self.record,
        )

    def regrade(
        self, reward: float, components: Row, fields: Row, record: EpisodeRecord | None = None, *, changed: bool
    ) -> Row:
        """Return the line with another verdict.

        Args:
            reward: The reward.
            components: The parts of the reward.
            fields: The other fields of the verdict.
            record: The record of the verification.
            changed: Whether the reward differs from the stored one, which is kept then.
        """
        names, sent = self.verdict_names or (), self.sent or {}
        stale = {*names, "reward", "reward_components", *MASK_FIELDS, "failure_kind", "failure_reason"}
        row = {name: sent[name] for name in names if name in sent}
        parts = {"reward_components": components} if components else {}
        line = {**_strip(self.line, stale), **row, **fields, "reward": reward, **parts}
        if isinstance(line.get(HOST), dict):
            before = {STORED_REWARD: self.reward} if changed and self.reward is not None else {}
            host = {key: value for key, value in self._host.items() if key not in RECORD_FIELDS}
            host |= self._replace_verification(record or EpisodeRecord()).to_fields()
            line[HOST] = {**host, **before, **describe_writer(), "outcome": "scored", "verdict": list(fields)}
        return line

    def _replace_verification(self, record: EpisodeRecord) -> EpisodeRecord:
        """Return *record* with the calls that made the conversation, which a verification does not repeat."""
        own = self.record
        kept = [call for call in own.calls if call.get("stage") != "verify"]
        judged = [call for call in record.calls if call.get("stage") == "verify"]
        return EpisodeRecord(record.step_rewards, kept + judged, own.left_out + record.left_out)


def get_agent_name(row: Row) -> str | None:
    """Return the name of the agent that *row* names, or `None`."""
    reference = row.get("agent_ref")
    name = reference.get("name") if isinstance(reference, dict) else None
    return name if isinstance(name, str) else None


def get_environment_name(row: Row) -> str | None:
    """Return the environment that *row* names by its agent, or `None`."""
    name = get_agent_name(row)
    return None if name is None else name.removesuffix(AGENT_SUFFIX)


def get_object(value: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return the object at *key*; an empty one if there is none."""
    found = value.get(key)
    return found if isinstance(found, dict) else {}


def read_index(line: Row, key: str, default: int) -> int:
    """Return the index *key* of a line, or *default* if it is missing or is not a whole number of 64 bits.

    The default of a task's index is the number of the line in its file, from 0.
    """
    index = line.get(key)
    return index if type(index) is int and abs(index) <= MAX_INDEX else default


def strip_results(row: Row, *, keep: Container[str] = ()) -> Row:
    """Return *row* without the keys that an earlier run wrote, including verdict fields; *keep* names exceptions."""
    names = StoredRollout(row).verdict_names or ()
    return _strip(row, RESULT_FIELDS.union(names, MASK_FIELDS, {ATTEMPT_INDEX}), keep)


def _strip(row: Row, stale: Container[str], keep: Container[str] = ()) -> Row:
    return {
        key: value for key, value in row.items() if key in keep or not (key in stale or key.startswith(FAILURE_PREFIX))
    }


# Reading


def parse(data: bytes, *, number: int, where: str, is_failure: bool = False, exact: bool = True) -> StoredRollout:
    """Return the rollout on a line of a file.

    Args:
        data: The line.
        number: The number of the line in its file, from 0.
        where: The file and the line's number, for the error.
        is_failure: Whether the line is from the file of failures.
        exact: Whether integers beyond 64 bits are read exactly; otherwise they become floats, in half of the time.

    Raises:
        BadRow: The line is not a JSON object, or a later version of gymsdk wrote it.
    """
    try:
        line = None if exact else orjson.loads(data)
    except orjson.JSONDecodeError:
        line = None
    if not isinstance(line, dict):
        # An integer of hundreds of digits is JSON, too.
        line = jsonl.parse_row(data, where=where)
    return StoredRollout(line, number=number, is_failure=is_failure, where=where)


def read(path: Path, *, is_failure: bool = False) -> Iterator[StoredRollout]:
    """Yield the rollouts of a file; raises `BadRow` if the file or a line cannot be read."""
    shown = shorten_path(path)
    for number, data in jsonl.read_lines(path):
        yield parse(data, number=number - 1, where=f"{shown}:{number}", is_failure=is_failure)


def parse_record(host: Mapping[str, Any]) -> EpisodeRecord:
    """Return the record of the episode among the fields of a `gymsdk` key."""
    rewards, calls, left_out = map(host.get, RECORD_FIELDS)
    return EpisodeRecord(
        [float(reward) for reward in rewards if is_finite_number(reward)] if isinstance(rewards, list) else [],
        [call for call in calls if isinstance(call, dict)] if isinstance(calls, list) else [],
        left_out if isinstance(left_out, int) else 0,
    )


def _check_format(host: Mapping[str, Any], where: str) -> None:
    found = host["format"]
    if type(found) is not int or found <= FORMAT:
        return
    writer = host.get("version")
    named = f"gymsdk {writer}" if isinstance(writer, str) else "a later version of gymsdk"
    package = f"gymsdk>={writer}" if isinstance(writer, str) else "gymsdk"
    raise BadRow(
        f"{where or 'the rollout'}: {named} wrote it in format {found}, and this version, {__version__}, reads"
        f" formats up to {FORMAT}; install the other version: pip install -U '{package}'"
    )


# Writing


def build_line(rollout: Rollout, key: Key, *, attempts: int = 1, digest: str = "", branch: Row | None = None) -> Row:
    """Return the line of a rollout.

    The fields of the verdict are top-level keys beside those of the row. A rollout without a reward has the kind, stage
    and message of the failure instead. A resume does not repeat the rollout if its failure is terminal.

    Args:
        rollout: The rollout.
        key: The position in its run.
        attempts: How often it was played.
        digest: The digest of the row as sent.
        branch: Where the rollout begins to differ from a stored one, if it does.

    Raises:
        ValueError: The reward of a scored rollout is not finite. JSON has no such number.
    """
    is_scored = rollout.outcome == "scored" and rollout.failure is None
    results, own = _build_scored_fields(rollout) if is_scored else _build_failed_fields(rollout, attempts)
    host = _build_host_fields(rollout, attempts, digest) | own | ({} if branch is None else {"branch": branch})
    return {**_build_row(rollout), **results, TASK_INDEX: key[0], ROLLOUT_INDEX: key[1], HOST: host}


def build_failure_fields(kind: str, **details: Any) -> Row:
    """Return NeMo Gym's fields of a failure of this *kind*; *details* are `stage`, `message`, `terminal` and others."""
    return {FAILURE_CLASS: kind} | {FAILURE_PREFIX + name: value for name, value in details.items()}


def is_terminal(failure: Failure) -> bool:
    """Return whether a resume must not repeat the rollout: another attempt cannot help, or would select by reward."""
    if failure.stage == "verify" and failure.kind in WORKER_FAILURE_KINDS:
        return True
    return not (failure.retryable or failure.stage == "model" or failure.kind in RESUMABLE_KINDS)


def _build_scored_fields(rollout: Rollout) -> tuple[Row, Row]:
    if rollout.reward is None or not math.isfinite(rollout.reward):
        raise ValueError(f"the reward of a scored rollout must be a finite number, not {rollout.reward}")
    verdict: Row = {}
    if rollout.verdict is not None:
        verdict = rollout.verdict.model_dump(mode="json", exclude={"reward", "components"})
    components = {"reward_components": rollout.components} if rollout.components else {}
    return {**verdict, "reward": rollout.reward, **components}, {"verdict": list(verdict)}


def _build_failed_fields(rollout: Rollout, attempts: int) -> tuple[Row, Row]:
    failure = rollout.failure or Failure(stage="", kind="unknown", message="")
    fields = build_failure_fields(
        failure.kind, stage=failure.stage, message=failure.message, terminal=is_terminal(failure)
    )
    return fields | {ATTEMPT_INDEX: attempts - 1}, {"retryable": failure.retryable}


def _build_row(rollout: Rollout) -> Row:
    row = strip_results(rollout.row)
    row_params = row.get("responses_create_params", {})
    params = {**row_params, **rollout.sampling, "input": rollout.opening or row_params.get("input", [])}
    params |= {"tools": rollout.tools} if rollout.tools else {}
    return {**row, "responses_create_params": params, "response": rollout.response}


def _build_host_fields(rollout: Rollout, attempts: int, digest: str) -> Row:
    # `model_dump` would take three times as long; a test compares the two.
    fields: Row = {name: getattr(rollout, name) for name in SCALAR_FIELDS if name != "rollout_id" or rollout.rollout_id}
    timing = vars(rollout.timing) | {
        "model_calls": [*rollout.timing.model_calls],
        "turns": [[*turn] for turn in rollout.timing.turns],
    }
    fields |= {"usage": {role: dict(vars(usage)) for role, usage in rollout.usage.items()}, "timing": timing}
    versions = responses.get_weight_versions(rollout.response)
    fields |= {"attempts": attempts} | ({TASK_DIGEST: digest} if digest else {})
    fields |= rollout.record.to_fields()
    return describe_writer() | fields | ({"weight_versions": versions} if versions else {})


def describe_writer() -> Row:
    """Return the fields of a `gymsdk` key that say which version wrote it, and in which format."""
    return {"format": FORMAT, "version": __version__}


def _is_set(name: str, value: object) -> bool:
    # Tables write `true` as 1. Other values of the mask are fields of an environment with the same name.
    return value == 1 if name == MASK else bool(value)


def _show(reward: object) -> str:
    if isinstance(reward, int):
        # Python does not convert the longest integers to text.
        return "an integer beyond the range of a double"
    return str(reward)[:MAX_SHOWN_CHARS]


def compute_seed(seed: int, environment: str, task: int) -> int:
    """Return the seed of an episode in a run with *seed*: that of all repeats of a task, so that they open alike."""
    digest = hashlib.sha256(f"{seed}:{environment}:{task}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1
