"""Record the rollouts of a scripted policy: the rows to send to the servers, and the rewards to expect."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

from gymsdk import jsonl
from gymsdk.environment import Environment
from gymsdk.errors import BadRow, UsageError
from gymsdk.line import build_line
from gymsdk.models.recordings import compute_digests
from gymsdk.rollouts.jobs import Job, PlayedJob, build_input_row, iter_jobs
from gymsdk.rollouts.players import LocalPlayer, collect
from gymsdk.rollouts.tasks import get_default_split, read_splits
from gymsdk.types import Model, Rollout, Row

RECORDING_CONCURRENCY = 8
"""How many episodes are recorded concurrently."""


@dataclass(frozen=True, slots=True)
class Recording:
    """Jobs of one environment, with the rewards of their episodes in this process, or `None` if they are unknown."""

    environment: str
    jobs: tuple[Job, ...]
    rewards: tuple[float, ...] | None = None
    lines: tuple[Row, ...] = ()

    def write(self, path: Path) -> None:
        """Write the rollouts to *path* for `scripted/replay`."""
        path.write_bytes(b"".join(jsonl.dump_portable_json(line) + b"\n" for line in self.lines))


def list_jobs(environment: Environment, *, split: str | None, limit: int, seed: int = 0) -> Recording:
    """Return the first *limit* tasks of a split without rewards. Raises `BadRow` if the split is empty."""
    selected = read_splits({environment.name: environment}, split, seed=seed, limit=limit)
    rows = [build_input_row(row, environment=environment.name, task=number) for number, (_, row) in enumerate(selected)]
    if not rows:
        split_name = split or get_default_split(environment)
        raise BadRow(f"split {split_name!r} of {environment.name!r} has no rows; choose another split with --split")
    return Recording(environment.name, tuple(iter_jobs(rows)))


async def record_rollouts(
    environment: Environment,
    model: Model,
    *,
    split: str | None,
    limit: int,
    seed: int = 0,
    keep: Callable[[Rollout], bool] = lambda _: True,
) -> Recording:
    """Play the first *limit* tasks of a split with *model* in this process and record the rollouts.

    Of tasks with the same opening, only the first is recorded, because a replay recognises a task by its opening.

    Args:
        environment: The environment.
        model: The model that plays.
        split: The split, or `None` for the default split.
        limit: How many tasks to play.
        seed: The seed of tasks and episodes.
        keep: Selects the rollouts to record.

    Raises:
        UsageError: An episode has no reward, or *keep* selects none.
    """
    recording = list_jobs(environment, split=split, limit=limit, seed=seed)
    play = LocalPlayer({environment.name: environment}, model, seed=seed, attempts=1)
    async with play.open(), aclosing(collect(recording.jobs, play, concurrency=RECORDING_CONCURRENCY)) as results:
        played = sorted([_select_scored(result) async for result in results], key=lambda result: result.job.task)
    chosen = _select_distinct([result for result in played if keep(result.rollout)])
    if not chosen:
        raise UsageError(
            f"no task of {environment.name!r} can be replayed deterministically; choose another split with --split"
        )
    return Recording(
        environment=environment.name,
        jobs=tuple(result.job for result in chosen),
        rewards=tuple(result.rollout.reward or 0.0 for result in chosen),
        lines=tuple(build_line(result.rollout, result.job.key) for result in chosen),
    )


def _select_scored(result: PlayedJob) -> PlayedJob:
    failure = result.rollout.failure
    if failure is not None:
        raise UsageError(
            f"task {result.job.task} of {result.job.environment!r} cannot be recorded"
            f" ({failure.kind}: {failure.message}); choose another split, or another scripted model"
        )
    return result


def _select_distinct(results: Sequence[PlayedJob]) -> list[PlayedJob]:
    distinct: dict[bytes, PlayedJob] = {}
    for result in results:
        request = result.rollout.row["responses_create_params"]
        distinct.setdefault(compute_digests(result.rollout.opening, request.get("instructions"))[-1], result)
    return list(distinct.values())
