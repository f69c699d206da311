"""Retry failed episodes, and stop a run when the model or the servers do not answer any more."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from gymsdk import types
from gymsdk.errors import BadRow, EpisodeError, ModelLost, Unscorable
from gymsdk.http.backoff import Backoff
from gymsdk.rollouts.jobs import Job
from gymsdk.types import Failure, Rollout, UsageByRole

BACKOFF = Backoff(first=0.25)
"""The delays between the attempts of one episode."""

MAX_RETRY_AFTER_SECONDS = 60.0
"""The longest `Retry-After` to wait for. An episode that must wait longer fails, and a resume plays it again."""

LOST_SESSION_KINDS = frozenset({"server_unreachable", "session_lost"})
"""Failure kinds that mean: the server that had the episode is gone, or has lost it."""

log = logging.getLogger("gymsdk")


@dataclass(frozen=True, slots=True)
class PlayedJob:
    """The last rollout of a job, with the usage of all attempts, and the number of attempts."""

    job: Job
    rollout: Rollout
    attempts: int


async def play_with_retries(job: Job, once: Callable[[Job, int], Awaitable[Rollout]], *, attempts: int) -> PlayedJob:
    """Play *job* until it is scored, cannot be scored, or has no attempts left.

    Args:
        job: The job.
        once: Plays the job once; its second argument is the index of the attempt.
        attempts: The most attempts.
    """
    attempt, used, unjudged = 0, UsageByRole(), 0
    while True:
        rollout = await once(job, attempt)
        attempt += 1
        unjudged += _is_unjudged(rollout.failure)
        used = types.merge_usage(used, rollout.usage)
        wait = _get_delay(rollout.failure, attempt) if attempt < attempts and unjudged <= 1 else None
        if wait is None:
            return PlayedJob(job, rollout.model_copy(update={"usage": used}), attempt)
        await asyncio.sleep(wait)


def _get_delay(failure: Failure | None, attempt: int) -> float | None:
    """Return the seconds until the next attempt, or `None` if there is none."""
    if failure is None or not failure.retryable:
        return None
    # Repeating an episode because its grader failed would sample answers until one suits the grader.
    if failure.stage == "verify" and not _is_unjudged(failure):
        return None
    if failure.retry_after is not None and failure.retry_after > MAX_RETRY_AFTER_SECONDS:
        return None
    return BACKOFF.get_delay(attempt - 1, failure.retry_after)


def _is_unjudged(failure: Failure | None) -> bool:
    """Return whether the server was lost during `verify`: the first time by accident, the second time by the answer."""
    return failure is not None and failure.stage == "verify" and failure.kind in LOST_SESSION_KINDS


async def catch_errors(job: Job, seed: int, playing: Awaitable[Rollout]) -> Rollout:
    """Await *playing*; turn any error, even a bug in this package, into a failed rollout of this job alone."""
    try:
        return await playing
    except BadRow as error:
        return build_failed_rollout(job, seed, Failure(stage="reset", kind="bad_row", message=str(error)))
    except EpisodeError as error:
        return build_unscored_rollout(job, seed, error)
    except Exception as error:
        log.exception("%s in gymsdk's own code while it played rollout %s", type(error).__name__, job.id)
        message = f"{type(error).__name__}: {error}"
        return build_failed_rollout(
            job, seed, Failure(stage="host", kind="host_broke", message=message, retryable=True)
        )


def build_failed_rollout(job: Job, seed: int, failure: Failure, used: UsageByRole | None = None) -> Rollout:
    """Return the rollout of a job of which only the failure and the usage are known."""
    return Rollout(
        id=job.id,
        environment=job.environment,
        row=job.row,
        seed=seed,
        repeat=job.repeat,
        outcome="failed",
        failure=failure,
        usage=used or {},
    )


def build_unscored_rollout(job: Job, seed: int, error: EpisodeError) -> Rollout:
    """Return the rollout of a job that servers played, and of which only the *error* is known."""
    failure = Failure(
        stage=error.stage or "host",
        kind=error.kind,
        message=str(error),
        retryable=error.retryable,
        retry_after=error.retry_after,
    )
    outcome = "unscorable" if isinstance(error, Unscorable) else "failed"
    return build_failed_rollout(job, seed, failure).model_copy(update={"outcome": outcome})


UNAVAILABLE_KINDS = frozenset(
    {"model_unreachable", "model_unauthorized", "model_not_found", "server_unreachable", "judge_failed"}
)
"""Failure kinds that no row can cause: a server is not reachable, or refuses this client."""

MAX_UNAVAILABLE_IN_A_ROW = 16
"""How many consecutive rollouts may fail with such a kind before the run stops."""

SERVER_ERROR_KINDS = frozenset({"server_unreachable", "server_timeout", "server_error"})
"""Failure kinds of the servers that play a run, where the servers gave no other."""

MAX_FAILURES_BEFORE_FIRST_SCORE = 64
"""How many rollouts may fail with a model's or server's error before any is scored."""


class CircuitBreaker:
    """Stops a run when the model or the servers are lost.

    Args:
        scored: The number of rollouts that an earlier part of the run has scored.
    """

    def __init__(self, *, scored: int = 0) -> None:
        self._scored = scored
        self._gone = 0
        self._failed = 0

    def record(self, rollout: Rollout) -> None:
        """Count a finished rollout; raises `ModelLost` if further rollouts would fail in the same way."""
        failure = rollout.failure
        if failure is None:
            self._scored += 1
            self._gone = 0
            return
        self._gone = self._gone + 1 if failure.kind in UNAVAILABLE_KINDS else 0
        self._failed = self._failed + 1 if failure.stage == "model" or failure.kind in SERVER_ERROR_KINDS else 0
        if self._gone >= MAX_UNAVAILABLE_IN_A_ROW:
            raise _build_model_lost(self._gone, failure)
        if not self._scored and self._failed >= MAX_FAILURES_BEFORE_FIRST_SCORE:
            raise _build_model_lost(self._failed, failure)


def _build_model_lost(count: int, failure: Failure) -> ModelLost:
    return ModelLost(f"stopped: the last {count} rollouts failed for the same reason ({failure.message})")
