"""The progress of a run on standard error: a live bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import typer

from gymsdk.rollouts.folder import Standing
from gymsdk.rollouts.retry import Played

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
        return (
            f"{len(standing.done)} of {self._total} rollouts, reward {_format_mean(standing)}, failed {standing.failed}"
        )


class _Bar:
    """The bar; what anybody writes to standard error meanwhile stands above it."""

    def __init__(self) -> None:
        self._bar: Bar | None = None

    def start(self, total: int) -> None:
        self._bar = _draws_bar()
        self._task = self._bar.add_task("rollouts", total=total, mean="-", failed=0)
        self._bar.start()

    def show(self, standing: Standing) -> None:
        if self._bar:
            mean, failed = _format_mean(standing), standing.failed
            self._bar.update(self._task, completed=len(standing.done), mean=mean, failed=failed)

    def stop(self) -> None:
        if self._bar:
            self._bar.stop()


def _format_mean(standing: Standing) -> str:
    return f"{standing.earned / standing.scored:.3f}" if standing.scored else "-"


def _draws_bar() -> Bar:
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


def format_metrics_table(figures: Sequence[dict[str, Any]]) -> str:
    """Give the figures, a column for each environment, what failed said beneath."""
    columns = [dict(_list_metrics(each)) for each in figures]
    found = dict.fromkeys(name for column in columns for name in column)
    names = sorted(found, key=lambda name: next(place for place, word in enumerate(ROW_ORDER) if name.startswith(word)))
    cells = [["", *(each["environment"] for each in figures)]]
    cells += [[name, *(column.get(name, "") for column in columns)] for name in names]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    told = dict.fromkeys(line for each in figures for line in _list_failures(each))
    return "\n".join([*(_format_row(row, widths) for row in cells), *told])


def _format_row(row: Sequence[str], widths: Sequence[int]) -> str:
    first, *rest = zip(row, widths, strict=True)
    return "  ".join([f"{first[0]:<{first[1]}}", *(f"{cell:>{width}}" for cell, width in rest)]).rstrip()


def _list_metrics(summary: dict[str, Any]) -> Iterator[tuple[str, str]]:
    outcomes, figures = summary["outcomes"], summary["agent_metrics"]
    yield "scored", f"{outcomes.get('scored', 0):,} of {sum(outcomes.values()):,}"
    if "mean/reward" in figures:
        yield "mean reward ± standard error", f"{figures['mean/reward']:.3f} ± {figures['stderr/reward']:.3f}"
    for key, value in figures.items():
        # A majority of one says nothing that pass@1 does not.
        if re.fullmatch(r"(pass@\d+|majority@([2-9]|\d\d+))/accuracy", key):
            yield key.removesuffix("/accuracy"), f"{value:.1f} %"
    for why, count in summary["ended"].items():
        if why != "done":
            yield f"out of {BUDGET_LABELS[why]}", f"{count:,}"
    yield from ((words, f"{summary[key]:,}") for key, words in LIMIT_LABELS.items() if summary[key])
    for kind, count in summary["failures"].items():
        yield f"no reward: {kind}", f"{count:,}"
    for role, used in summary["usage"].items():
        yield f"tokens in, {role}", f"{used.get('input_tokens', 0):,}"
        yield f"tokens out, {role}", f"{used.get('output_tokens', 0):,}"
    for stage, seconds in summary["seconds"].items():
        yield f"seconds in {stage}", f"{seconds:.4f}" if seconds >= SMALLEST_SHOWN else f"<{SMALLEST_SHOWN}"


ROW_ORDER = (
    *("scored", "mean", "pass", "majority", "out of", "prompt", "too much", "no reward"),
    *("tokens in", "tokens out", "seconds"),
)
"""What the rows begin with, from the top of the table to its end."""

LIMIT_LABELS = {"prompts_too_long": "prompt too long", "grader_timeouts": "too much for the grader"}
"""What was too much, and for whom."""

BUDGET_LABELS = {"turns": "turns", "tools": "tool calls", "tokens": "tokens", "deadline": "time"}
"""What an episode ran out of, by how it ended."""

SMALLEST_SHOWN = 0.0001
"""Seconds below which a stage is shown as that."""


def _list_failures(summary: dict[str, Any]) -> Iterator[str]:
    for kind, message in summary["failure_messages"].items():
        yield f"{kind}: {message}"
    if summary["complaint"]:
        yield f"no figures of its own: {summary['complaint']}"
