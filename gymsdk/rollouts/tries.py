"""Tries: one job, played again until it is settled or has been tried often enough."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from gymsdk import usage
from gymsdk.errors import BadRow, EpisodeError, Unscorable
from gymsdk.outcome import Failure, Rollout
from gymsdk.rollouts.jobs import Job
from gymsdk.usage import Ledger

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
    attempt, used, unjudged = 0, Ledger(), 0
    while True:
        rollout = await once(job, attempt)
        attempt += 1
        unjudged += _is_unjudged(rollout.failure)
        used = usage.together(used, rollout.usage)
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


def lost(job: Job, seed: int, failure: Failure, used: Ledger | None = None) -> Rollout:
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
