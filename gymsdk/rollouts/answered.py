"""What a server answered to a row: its rollout or its judgement, ours or NeMo Gym's, or why there is none."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeGuard

import orjson
from pydantic import ValidationError

from gymsdk import responses, turns, usage
from gymsdk.errors import EpisodeError, Failed, Unscorable
from gymsdk.http import EXCERPT, Answer
from gymsdk.outcome import Rollout, Timing
from gymsdk.rollouts import lines
from gymsdk.rollouts.jobs import Job
from gymsdk.rollouts.lines import StoredVerdict
from gymsdk.rollouts.tries import unscored
from gymsdk.transcript import Item
from gymsdk.types import LINE, Row

BESIDE = LINE | {"reward", "components", "mask_sample", "failure_kind", "failure_reason", "task_source", "skills_ref"}
"""What a judged row holds beside its own fields and the verdict's."""

STAMPS = ("_ng_", "ng_")
"""What the names begin with of what NeMo Gym's collector and its captures write."""

UNFIT = 422
"""The status that says that the data, and not the server, is at fault."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """A reward, its parts, and the verdict's own fields as plain JSON."""

    reward: float
    components: dict[str, float]
    fields: Item


def object_of(answer: Answer, stage: str) -> Row:
    """Give the row *answer* holds; raises `EpisodeError` where it is a refusal, or no row."""
    from gymsdk.servers.app import parsed

    if not answer.ok:
        raise refused(answer, stage)
    try:
        found = parsed(answer.body)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise _unread(f"{answer.host} answered with no JSON object: {answer.text[:EXCERPT]!r}", stage)
    return found


def refused(answer: Answer, stage: str) -> EpisodeError:
    """Give the failure that a refusal means: the one it tells of, or else what its status says."""
    from gymsdk.servers import calling

    if answer.status != UNFIT or calling.broken(answer) is not None:
        return calling.refused(answer, stage)
    return Failed(f"{answer.host}: {_detail(answer)}", kind="bad_row", stage="reset")


def _detail(answer: Answer) -> str:
    """Give a refusal's sentence, or else what there is of its text."""
    try:
        told = orjson.loads(answer.body)
    except orjson.JSONDecodeError:
        told = None
    detail = told.get("detail") if isinstance(told, dict) else None
    return detail if isinstance(detail, str) else f"answered {answer.status}: {answer.text[:EXCERPT]}"


def judgement(body: Row, row: Row) -> Judgement:
    """Give what *body* judges of *row*; raises `Unscorable` where it says itself that its reward is none."""
    if (masked := _masked(body)) is not None:
        raise masked
    reward: object = body.get("reward")
    parts = body.get("reward_components") or {}
    if not _is_number(reward):
        raise _unread(f"the server judged without a reward: {str(reward)[:EXCERPT]}", "verify")
    if not isinstance(parts, dict) or not all(map(_is_number, parts.values())):
        raise _unread(f"the server's `reward_components` are no numbers by name: {str(parts)[:EXCERPT]}", "verify")
    return Judgement(reward=float(reward), components=parts, fields=_own(body, row))


def _masked(body: Row) -> Unscorable | None:
    """Give why the reward in *body* does not count, `None` where it does."""
    if not (body.get("mask_sample") is True or body.get("_ng_failure_class") or body.get("verification_skipped")):
        return None
    skipped = "verification_skipped" if body.get("verification_skipped") else "judge_failed"
    kind = str(body.get("failure_kind") or body.get("_ng_failure_class") or skipped)
    told = (body.get(f"_ng_failure_{word}") for word in ("judge_error", "message"))
    why = body.get("failure_reason") or next(filter(None, told), f"the server gives no reward: {kind}")
    again = body.get("_ng_failure_terminal") is not True
    return Unscorable(str(why), kind=kind, stage="verify", retryable=again)


def _own(body: Row, row: Row) -> Item:
    """Give the verdict's own fields: those *body* names as that, or else what neither the row has so nor a stamp is."""
    ours = body.get("gymsdk")
    names = ours.get("verdict") if isinstance(ours, dict) else None
    if isinstance(names, list):
        return {name: body[name] for name in names if name in body}
    told = ((name, each) for name, each in body.items() if name not in BESIDE and not name.startswith(STAMPS))
    return {name: each for name, each in told if name not in row or row[name] != each}


def rollout(body: Row, job: Job, seed: int, *, milliseconds: float) -> Rollout:
    """Give the rollout of *job* that *body* tells of; raises `EpisodeError` where it cannot be read."""
    try:
        found = _ours(body, job) if isinstance(body.get("gymsdk"), dict) else _theirs(body, job, seed, milliseconds)
    except (KeyError, TypeError, AttributeError, ValidationError) as error:
        raise _unread(f"the server's rollout cannot be read: {type(error).__name__}: {error}", "verify") from error
    asked = {"id": job.id, "environment": job.environment, "row": job.row, "seed": seed, "repeat": job.repeat}
    return found.model_copy(update=asked)


def _ours(body: Row, job: Job) -> Rollout:
    judgement(body, job.row)
    return lines.read(body)


def _theirs(body: Row, job: Job, seed: int, milliseconds: float) -> Rollout:
    """Give the rollout of a line that has nothing of ours: what NeMo Gym leaves unsaid is read off the response."""
    played = _played(body, job, milliseconds)
    try:
        judged = judgement(body, job.row)
    except Unscorable as error:
        return unscored(job, seed, error).model_copy(update=played)
    return Rollout(
        id=job.id,
        environment=job.environment,
        row=job.row,
        seed=seed,
        outcome="scored",
        reward=judged.reward,
        components=judged.components,
        verdict=StoredVerdict(**{**judged.fields, "reward": judged.reward, "components": judged.components}),
    ).model_copy(update=played)


def _played(body: Row, job: Job, milliseconds: float) -> dict[str, Any]:
    response = body.get("response")
    if not isinstance(response, dict) or not responses.is_response(response):
        raise _unread(f"the server's rollout has no Response object: {str(response)[:EXCERPT]}", "verify")
    params = {**job.row["responses_create_params"], **(body.get("responses_create_params") or {})}
    asked = len(list(turns.spans(response["output"])))
    return {
        "ended": "tokens" if responses.is_incomplete(response) else "done",
        "opening": _items(params["input"]),
        "tools": params.get("tools") or [],
        "response": response,
        "turns": asked,
        "usage": {"policy": usage.of(response).model_copy(update={"calls": asked})},
        "timing": Timing(total=round(milliseconds, 3)),
    }


def _items(prompt: str | list[Item]) -> list[Item]:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _unread(message: str, stage: str) -> Failed:
    return Failed(message, kind="bad_answer", stage=stage)
