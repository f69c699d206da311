"""Told: what a server's answer says: an object, a verdict, or why there is none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeGuard

from gymsdk import http
from gymsdk.errors import EpisodeError, Failed, Unscorable
from gymsdk.http import EXCERPT, Answer
from gymsdk.transcript import Item
from gymsdk.types import LINE, UNMASKED, Row
from gymsdk.values import is_finite, parsed

BESIDE = LINE | UNMASKED.keys() | {"reward", "components", "task_source", "skills_ref"}
"""What a judged row holds beside its own fields and the verdict's."""

STAMPS = ("_ng_", "ng_")
"""What the names begin with of what NeMo Gym's collector and its captures write."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """A reward, its parts, and the verdict's own fields as plain JSON."""

    reward: float
    components: dict[str, float]
    fields: Item


def object_of(answer: Answer, stage: str) -> Item:
    """Give the object that *answer* holds; raises `Failed` where there is none."""
    value = value_of(answer)
    if isinstance(value, dict):
        return value
    raise unread(f"{answer.host} answered {answer.status} with no JSON object: {answer.text[:EXCERPT]!r}", stage)


def value_of(answer: Answer) -> object:
    """Give the JSON value that *answer* holds, `None` where there is none."""
    try:
        return parsed(answer.body)
    except (ValueError, RecursionError):
        return None


def broken(answer: Answer) -> EpisodeError | None:
    """Give what *answer* says is broken beneath the environment, `None` where it is the environment's own answer."""
    value = None if answer.ok else value_of(answer)
    said = value if isinstance(value, dict) else {}
    kind, where, retryable = said.get("kind"), said.get("stage"), said.get("retryable")
    if not (isinstance(kind, str) and isinstance(where, str)):
        return None
    into = Unscorable if said.get("outcome") == "unscorable" else Failed
    return into(
        str(said.get("detail")),
        kind=kind,
        stage=where,
        retryable=retryable if isinstance(retryable, bool) else answer.status >= 500,  # noqa: PLR2004 - its own errors
        retry_after=answer.retry_after,
    )


def refused(answer: Answer, stage: str) -> EpisodeError:
    """Give the failure that an *answer* which is no success means at *stage*."""
    found = broken(answer)
    if found is not None:
        return found
    message = f"{answer.host} answered {answer.status}: {answer.text[:EXCERPT]}"
    again = http.worth_retrying(answer.status)
    return Failed(message, kind="server_error", stage=stage, retryable=again, retry_after=answer.retry_after)


def is_ours(body: Row) -> bool:
    """Whether *body* was judged by gymsdk, and does not just carry on what was sent under that name."""
    ours = body.get("gymsdk")
    return isinstance(ours, dict) and isinstance(ours.get("verdict"), list) and "outcome" in ours


def judgement(body: Row, row: Row) -> Judgement:
    """Give what *body* judges of *row*; raises `Unscorable` where it says itself that its reward is none."""
    if (masked := _masked(body)) is not None:
        raise masked
    reward: object = body.get("reward")
    parts = body.get("reward_components") or {}
    if not _is_number(reward):
        raise unread(f"the server judged without a reward: {str(reward)[:EXCERPT]}", "verify")
    if not isinstance(parts, dict) or not all(map(_is_number, parts.values())):
        raise unread(f"the server's `reward_components` are no numbers by name: {str(parts)[:EXCERPT]}", "verify")
    return Judgement(reward=float(reward), components=parts, fields=_own(body, row))


def unread(message: str, stage: str) -> Failed:
    """Give the failure of an answer that cannot be read."""
    return Failed(message, kind="bad_answer", stage=stage)


def _masked(body: Row) -> Unscorable | None:
    """Give why the reward in *body* does not count, `None` where it does."""
    # Ours has a verdict only where its reward counts; a field of that name is then the environment's own.
    if is_ours(body) and body["gymsdk"]["outcome"] == "scored":
        return None
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
    if is_ours(body):
        return {name: body[name] for name in body["gymsdk"]["verdict"] if name in body}
    told = ((name, each) for name, each in body.items() if name not in BESIDE and not name.startswith(STAMPS))
    return {name: each for name, each in told if name not in row or row[name] != each}


def _is_number(value: object) -> TypeGuard[float]:
    return is_finite(value)
