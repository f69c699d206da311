"""A recording: tasks as they were played in this process, by which servers' rewards can be told right from wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

from gymsdk import rows
from gymsdk.environment import Environment
from gymsdk.errors import BadRow, UsageError
from gymsdk.outcome import Rollout
from gymsdk.recordings import marks
from gymsdk.rollouts import lines
from gymsdk.rollouts.collect import Play, collect
from gymsdk.rollouts.jobs import Job, jobs, stamped
from gymsdk.rollouts.sources import default_split, from_splits
from gymsdk.rollouts.tries import Played
from gymsdk.types import Model, Row

AT_ONCE = 8
"""Episodes that are recorded at once."""


@dataclass(frozen=True, slots=True)
class Recording:
    """Jobs of one environment, and the rewards their episodes had here; none where nobody knows who plays."""

    environment: str
    jobs: tuple[Job, ...]
    rewards: tuple[float, ...] | None = None
    lines: tuple[Row, ...] = ()

    def write(self, path: Path) -> None:
        """Write the rollouts to *path*, for `scripted/replay`."""
        path.write_bytes(b"".join(rows.written(line) + b"\n" for line in self.lines))


def unplayed(environment: Environment, *, split: str | None, limit: int, seed: int = 0) -> Recording:
    """Give the first *limit* tasks of a split, nothing known of their rewards; raises `BadRow` where there is none."""
    taken = from_splits({environment.name: environment}, split, seed=seed, limit=limit)
    sent = [stamped(row, environment=environment.name, task=number) for number, (_, row) in enumerate(taken)]
    if not sent:
        named = split or default_split(environment)
        raise BadRow(f"split {named!r} of {environment.name!r} has no rows to play; name another with --split")
    return Recording(environment.name, tuple(jobs(sent)))


async def recorded(
    environment: Environment,
    model: Model,
    *,
    split: str | None,
    limit: int,
    seed: int = 0,
    keep: Callable[[Rollout], bool] = lambda _: True,
) -> Recording:
    """Play the first *limit* tasks of a split with *model* here, and give the rollouts to *keep*.

    Of tasks that open alike only the first is kept: by what is said a replay could not tell them apart. Raises
    `UsageError` where an episode has no reward, or none is kept.
    """
    asked = unplayed(environment, split=split, limit=limit, seed=seed)
    player = Play({environment.name: environment}, model, seed=seed, attempts=1)
    async with player.opened(), aclosing(collect(asked.jobs, player, at_once=AT_ONCE)) as ends:
        played = sorted([_judged(each) async for each in ends], key=lambda each: each.job.task)
    chosen = _distinct([each for each in played if keep(each.rollout)])
    if not chosen:
        raise UsageError(f"no task of {environment.name!r} is played as it is to be for this bench; name another split")
    return Recording(
        environment=environment.name,
        jobs=tuple(each.job for each in chosen),
        rewards=tuple(each.rollout.reward or 0.0 for each in chosen),
        lines=tuple(lines.scored(each.rollout, each.job.key) for each in chosen),
    )


def _judged(played: Played) -> Played:
    failure = played.rollout.failure
    if failure is not None:
        raise UsageError(
            f"task {played.job.task} of {played.job.environment!r} cannot be recorded"
            f" ({failure.kind}: {failure.message}); name another split, or another scripted model"
        )
    return played


def _distinct(played: Sequence[Played]) -> list[Played]:
    found: dict[bytes, Played] = {}
    for each in played:
        asked = each.rollout.row["responses_create_params"]
        found.setdefault(marks(each.rollout.opening, asked.get("instructions"))[-1], each)
    return list(found.values())
