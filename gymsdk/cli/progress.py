"""The progress of a run, live on a terminal's standard error."""

from __future__ import annotations

import sys
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from gymsdk.errors import BadRow
from gymsdk.rollouts import Played


class Progress:
    """A bar with the mean reward so far and the count of rollouts without one."""

    def __init__(self) -> None:
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("reward {task.fields[mean]:.3f}"),
            TextColumn("failed {task.fields[failed]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=False,
            disable=not sys.stderr.isatty(),
        )
        self._task = self._bar.add_task("rollouts", total=None, mean=0.0, failed=0)
        self._sum, self._scored, self._failed = 0.0, 0, 0

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def skipped(self, error: BadRow) -> None:
        """Say which row is left out."""
        self._bar.console.print(f"skipped {error}", style="yellow", markup=False, highlight=False)

    def begun(self, *, total: int, done: int) -> None:
        """Show where the run stands."""
        self._bar.update(self._task, total=total, completed=done)
        if done:
            self._bar.console.print(f"resumed: {done} of {total} rollouts are done", highlight=False)

    def ended(self, played: Played) -> None:
        """Count one rollout."""
        reward = played.rollout.reward
        self._failed += reward is None
        self._scored += reward is not None
        self._sum += reward or 0.0
        self._bar.update(self._task, advance=1, mean=self._sum / max(1, self._scored), failed=self._failed)
