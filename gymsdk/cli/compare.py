"""`gymsdk compare`: compare two runs task by task."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import BaseModel, Field

from gymsdk.cli import options
from gymsdk.cli.fields import take_models
from gymsdk.cli.output import echo, print_json
from gymsdk.settings import Flag
from gymsdk.working_folder import shorten_path

if TYPE_CHECKING:
    from gymsdk.runs.compare import Comparison, Difference, TaskPair

COMPARISON = "Comparison"


class ComparisonOptions(BaseModel):
    """The compared values, and the length of the lists."""

    limit: Annotated[int, Flag(COMPARISON, "N")] = Field(10, ge=0, description="List at most N lost and N won tasks.")
    seed: Annotated[int, Flag(COMPARISON, "S")] = Field(0, ge=0, description="The seed of the bootstrap.")
    by: Annotated[str | None, Flag(COMPARISON, "FIELD", shown=False)] = Field(
        None, description="Print the difference for each value of a field of the first run, such as row:NAME or tag."
    )


@take_models
def compare(
    first: Annotated[Path, typer.Argument(metavar="A", help="The folder of the first run.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="The folder of the second run.")],
    *,
    chosen: ComparisonOptions,
    json: options.Json = False,
) -> None:
    """Compare two runs on the tasks that both have.

    The command prints the difference of the mean rewards with a 95 % confidence interval, and the tasks with the
    largest differences.

    Examples:
        gymsdk compare rollouts/base rollouts/tuned
        gymsdk compare rollouts/base rollouts/tuned --by row:difficulty
        gymsdk compare rollouts/base rollouts/tuned --json
    """
    from gymsdk import runs
    from gymsdk.runs.compare import to_json

    with runs.read(first) as a, runs.read(second) as b:
        comparison = a.compare(b, seed=chosen.seed, by=chosen.by)
    if json:
        print_json(to_json(comparison))
    else:
        for line in _format_comparison(comparison, (str(shorten_path(first)), str(shorten_path(second))), chosen.limit):
            echo(line)
    for warning in comparison.warnings:
        typer.echo(f"warning: {warning}", err=True)
    if comparison.overall is None:
        raise typer.Exit(1)


def _format_comparison(comparison: Comparison, paths: tuple[str, str], limit: int) -> Iterator[str]:
    from gymsdk.cli.show import clean
    from gymsdk.runs.compare import list_best, list_worst

    if comparison.overall is None:
        return
    yield f"A  {comparison.a}"
    yield f"B  {comparison.b}"
    yield ""
    yield f"{'':16}{'tasks':>6}{'A':>8}{'B':>8}{'B - A':>8}  {'95 % interval':18}{'better':>7}{'worse':>7}"
    for difference in comparison.environments:
        yield _format_difference(difference.environment, difference)
    for value, difference in comparison.groups.items():
        # A value comes from the rows, and may contain control characters.
        yield _format_difference(clean(value), difference)
    yield _format_difference("all", comparison.overall)
    overall = comparison.overall
    yield ""
    yield (
        f"{overall.flips_up} tasks are solved by B only, {overall.flips_down} by A only"
        " (a task counts as solved from a mean reward of 0.5)"
    )
    for title, pairs in (
        ("B loses most", list_worst(comparison, limit)),
        ("B gains most", list_best(comparison, limit)),
    ):
        if pairs:
            yield ""
            yield typer.style(title, bold=True)
            yield from (_format_pair(pair) for pair in pairs)
    listed = [*list_worst(comparison, limit), *list_best(comparison, limit)]
    if listed:
        yield ""
        yield f"gymsdk show {paths[0]} {listed[0].shown_a} and gymsdk show {paths[1]} {listed[0].shown_b}"
        yield "print the first of these tasks"


def _format_difference(name: str, difference: Difference) -> str:
    interval = "" if difference.low is None else f"{difference.low:+.3f} to {difference.high:+.3f}"
    marked = " *" if difference.is_significant else ""
    return (
        f"{name:16}{difference.tasks:6}{difference.a:8.3f}{difference.b:8.3f}{difference.difference:+8.3f}"
        f"  {interval + marked:18}{difference.better:7}{difference.worse:7}"
    )


def _format_pair(pair: TaskPair) -> str:
    from gymsdk.cli.show import clean

    task = str(pair.task_a) if pair.task_a == pair.task_b else f"{pair.task_a}/{pair.task_b}"
    return f"  task {task:9}  {pair.a:.2f} → {pair.b:.2f}  {clean(pair.prompt)}"
