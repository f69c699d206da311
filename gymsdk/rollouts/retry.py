"""A run's patience with a model, or with servers, that give no answers."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from gymsdk import types
from gymsdk.errors import BadRow, EpisodeError, ModelLost, Unscorable
from gymsdk.rollouts.jobs import Job
from gymsdk.types import Failure, Rollout, UsageByRole

PAUSE = 0.25
"""Seconds before a failed episode's second try, doubled before each further one."""

LONGEST = 60.0
"""Seconds a try waits at most: an episode that is asked to wait longer is listed, for a resume."""

GONE = frozenset({"server_unreachable", "session_lost"})
"""What a failure is called where the server that had the episode is there no more, or has lost it."""

log = logging.getLogger("gymsdk")


@dataclass(frozen=True, slots=True)
class Played:
    """A job's last rollout, with the usage of all its tries, and how many those were."""

    job: Job
    rollout: Rollout
    attempts: int


async def settled(job: Job, once: Callable[[Job, int], Awaitable[Rollout]], *, attempts: int) -> Played:
    """Play *job* by *once*, told which try it is from 0, until it is judged, cannot be, or *attempts* are over."""
    attempt, used, unjudged = 0, UsageByRole(), 0
    while True:
        rollout = await once(job, attempt)
        attempt += 1
        unjudged += _is_unjudged(rollout.failure)
        used = types.merge_usage(used, rollout.usage)
        wait = _wait(rollout.failure, attempt) if attempt < attempts and unjudged <= 1 else None
        if wait is None:
            return Played(job, rollout.model_copy(update={"usage": used}), attempt)
        await asyncio.sleep(wait)


def _wait(failure: Failure | None, attempt: int) -> float | None:
    """Give the seconds until the next try, `None` where there is to be none."""
    if failure is None or not failure.retryable:
        return None
    # Playing again what the grader failed on would draw answers until one suits it.
    if failure.stage == "verify" and not _is_unjudged(failure):
        return None
    if failure.retry_after is not None and failure.retry_after > LONGEST:
        return None
    return max(PAUSE * 2.0 ** (attempt - 1) * random.uniform(0.5, 1.5), failure.retry_after or 0.0)


def _is_unjudged(failure: Failure | None) -> bool:
    """Whether the server went while it judged: once that is an accident, twice the answers may be what it died of."""
    return failure is not None and failure.stage == "verify" and failure.kind in GONE


async def guarded(job: Job, seed: int, playing: Awaitable[Rollout]) -> Rollout:
    """Give the rollout *playing* comes to; whatever breaks it, even the host, breaks no other."""
    try:
        return await playing
    except BadRow as error:
        return lost(job, seed, Failure(stage="reset", kind="bad_row", message=str(error)))
    except EpisodeError as error:
        return unscored(job, seed, error)
    except Exception as error:
        log.exception("%s broke the host in rollout %s", type(error).__name__, job.id)
        message = f"{type(error).__name__}: {error}"
        return lost(job, seed, Failure(stage="host", kind="host_broke", message=message, retryable=True))


def lost(job: Job, seed: int, failure: Failure, used: UsageByRole | None = None) -> Rollout:
    """Give the rollout of a job of which nothing is left but its failure and what it *used*."""
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


def unscored(job: Job, seed: int, error: EpisodeError) -> Rollout:
    """Give the rollout of a job that was played elsewhere, and of which only *error* was told."""
    failure = Failure(
        stage=error.stage or "host",
        kind=error.kind,
        message=str(error),
        retryable=error.retryable,
        retry_after=error.retry_after,
    )
    outcome = "unscorable" if isinstance(error, Unscorable) else "failed"
    return lost(job, seed, failure).model_copy(update={"outcome": outcome})


PATIENCE_GONE = frozenset(
    {"model_unreachable", "model_unauthorized", "model_not_found", "server_unreachable", "judge_failed"}
)
"""Failures that no row brings about: a server is not there, or not for us."""

STREAK = 16
"""How many rollouts in a row may be lost to a server that is not there."""

SERVERS = frozenset({"server_unreachable", "server_timeout", "server_error"})
"""Failures of the servers that play a run, where they have not said more."""

NONE_YET = 64
"""How many rollouts may fail for them before any has been scored."""


class Patience:
    """Listens to a run; *scored* are the rollouts that an earlier part of the run has scored."""

    def __init__(self, *, scored: int = 0) -> None:
        self._scored = scored
        self._gone = 0
        self._failed = 0

    def heard(self, rollout: Rollout) -> None:
        """Count one finished rollout; raises `ModelLost` where further ones would only fail alike."""
        failure = rollout.failure
        if failure is None:
            self._scored += 1
            self._gone = 0
            return
        self._gone = self._gone + 1 if failure.kind in PATIENCE_GONE else 0
        self._failed = self._failed + 1 if failure.stage == "model" or failure.kind in SERVERS else 0
        if self._gone >= STREAK:
            raise _lost(self._gone, failure)
        if not self._scored and self._failed >= NONE_YET:
            raise _lost(self._failed, failure)


def _lost(count: int, failure: Failure) -> ModelLost:
    return ModelLost(f"stopped, since {count} rollouts in a row failed alike ({failure.message})")
