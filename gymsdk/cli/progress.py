"""The progress of a run on standard error: a live bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

import typer

from gymsdk.rollouts.folder import Standing
from gymsdk.rollouts.tries import Played

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

EVERY = 10.0
"""Seconds between two lines where there is no terminal."""


class Progress:
    """Follows a run: how many rollouts are done, what they earned on average, how many have no reward."""

    def __init__(self) -> None:
        self._total = 0
        self._standing = Standing()
        self._bar = _Bar() if sys.stderr.isatty() else None
        self._next = time.monotonic() + EVERY

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def told(self, sentence: str) -> None:
        """Say what a person should know of the run."""
        typer.echo(sentence, err=True)

    def begun(self, *, total: int, standing: Standing) -> None:
        """Show where the run stands."""
        self._total, self._standing = total, standing
        if standing.done:
            self.told(f"resumed: {len(standing.done)} of {total} rollouts are done")
        if self._bar:
            self._bar.start(total)
            self._bar.show(standing)

    def ended(self, played: Played) -> None:
        """Count one rollout."""
        standing, reward = self._standing, played.rollout.reward
        standing.done.add(played.job.key)
        standing.scored += reward is not None
        standing.earned += reward or 0.0
        standing.failed += reward is None
        if self._bar:
            self._bar.show(standing)
        elif time.monotonic() >= self._next:
            self._next = time.monotonic() + EVERY
            self.told(self._line())

    def _line(self) -> str:
        standing = self._standing
        return f"{len(standing.done)} of {self._total} rollouts, reward {_mean(standing)}, failed {standing.failed}"


class _Bar:
    """The bar; what anybody writes to standard error meanwhile stands above it."""

    def __init__(self) -> None:
        self._bar: Bar | None = None

    def start(self, total: int) -> None:
        self._bar = _drawn()
        self._task = self._bar.add_task("rollouts", total=total, mean="-", failed=0)
        self._bar.start()

    def show(self, standing: Standing) -> None:
        if self._bar:
            mean, failed = _mean(standing), standing.failed
            self._bar.update(self._task, completed=len(standing.done), mean=mean, failed=failed)

    def stop(self) -> None:
        if self._bar:
            self._bar.stop()


def _mean(standing: Standing) -> str:
    return f"{standing.earned / standing.scored:.3f}" if standing.scored else "-"


def _drawn() -> Bar:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    return Bar(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("reward {task.fields[mean]}"),
        TextColumn("failed {task.fields[failed]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        redirect_stdout=False,
        expand=True,
    )
