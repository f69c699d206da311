"""What a server answered to a row: its rollout or its judgement, ours or NeMo Gym's, or why there is none."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from gymsdk import responses, told, turns, usage
from gymsdk.errors import EpisodeError, Failed, Unscorable
from gymsdk.http import EXCERPT, Answer
from gymsdk.outcome import Rollout, Timing
from gymsdk.rollouts import lines
from gymsdk.rollouts.jobs import Job
from gymsdk.rollouts.lines import StoredVerdict
from gymsdk.rollouts.tries import unscored
from gymsdk.transcript import Item
from gymsdk.types import Row

UNFIT = 422
"""The status that says that the data, and not the server, is at fault."""


def object_of(answer: Answer, stage: str) -> Row:
    """Give the row *answer* holds; raises `EpisodeError` where it is a refusal, or no row."""
    if not answer.ok:
        raise refused(answer, stage)
    return told.object_of(answer, stage)


def refused(answer: Answer, stage: str) -> EpisodeError:
    """Give the failure that a refusal means: the one it tells of, or else what its status says."""
    if answer.status != UNFIT or told.broken(answer) is not None:
        return told.refused(answer, stage)
    return Failed(f"{answer.host}: {_detail(answer)}", kind="bad_row", stage="reset")


def _detail(answer: Answer) -> str:
    """Give a refusal's sentence, or else what there is of its text."""
    said = told.value_of(answer)
    detail = said.get("detail") if isinstance(said, dict) else None
    return detail if isinstance(detail, str) else f"answered {answer.status}: {answer.text[:EXCERPT]}"


def rollout(body: Row, job: Job, seed: int, *, milliseconds: float) -> Rollout:
    """Give the rollout of *job* that *body* tells of; raises `EpisodeError` where it cannot be read."""
    try:
        found = _ours(body, job) if told.is_ours(body) else _theirs(body, job, seed, milliseconds)
    except (KeyError, TypeError, AttributeError, ValidationError) as error:
        raise told.unread(f"the server's rollout cannot be read: {type(error).__name__}: {error}", "verify") from error
    asked = {"id": job.id, "environment": job.environment, "row": job.row, "seed": seed, "repeat": job.repeat}
    return found.model_copy(update=asked)


def _ours(body: Row, job: Job) -> Rollout:
    told.judgement(body, job.row)
    return lines.read(body)


def _theirs(body: Row, job: Job, seed: int, milliseconds: float) -> Rollout:
    """Give the rollout of a line that has nothing of ours: what NeMo Gym leaves unsaid is read off the response."""
    played = _played(body, job, milliseconds)
    try:
        judged = told.judgement(body, job.row)
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
        raise told.unread(f"the server's rollout has no Response object: {str(response)[:EXCERPT]}", "verify")
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
