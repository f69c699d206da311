"""`gymsdk bench`: measure the load that served environments sustain."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from gymsdk.cli import options
from gymsdk.errors import UsageError

if TYPE_CHECKING:
    from gymsdk.bench.load import BenchPlan
    from gymsdk.bench.report import BenchResult, LoadResult


def bench(  # noqa: PLR0913  # each is an option of the command
    names: Annotated[
        list[str], typer.Argument(metavar="NAME...", help="Name one or more environments.", show_default=False)
    ],
    *,
    head: options.Head = None,
    rollouts: Annotated[
        int, typer.Option(min=1, metavar="N", help="Play N rollouts per load.", rich_help_panel=options.RUN)
    ] = 200,
    minutes: Annotated[
        float | None,
        typer.Option(
            min=0.01,
            metavar="M",
            callback=options.check_finite,
            help="Run each load for M minutes instead.",
            rich_help_panel=options.RUN,
        ),
    ] = None,
    concurrency: Annotated[
        str,
        typer.Option(
            metavar="C[,C...]",
            help="Run one load per number, with this many concurrent rollouts.",
            rich_help_panel=options.RUN,
        ),
    ] = "1,16,64",
    model: Annotated[
        str | None,
        typer.Option(
            metavar="scripted/NAME",
            help="Play with this model inside the servers; with --head, check rewards against this model's.",
            show_default="an endpoint that replays scripted/oracle",
            rich_help_panel=options.MODEL,
        ),
    ] = None,
    split: options.Split = None,
    settings: options.Settings = [],  # noqa: B006  # typer copies it
    attempts: Annotated[
        int,
        typer.Option(
            min=1, metavar="N", help="Try a rollout that fails up to N times.", rich_help_panel=options.LIMITS
        ),
    ] = 1,
    json: options.Json = False,
) -> None:
    """Measure throughput and latency of served environments.

    The command also measures CPU time and memory, for each number of concurrent rollouts.

    Without --head, the command starts the servers of each environment in processes of their own and stops them.

    Examples:
        gymsdk bench math
        gymsdk bench tool_call --rollouts 500 --concurrency 1,64
    """
    from gymsdk.bench.load import BenchPlan
    from gymsdk.cli.process import Stopped, run_until_signal

    plan = BenchPlan(
        environments=options.parse_settings(names, settings),
        concurrency_levels=_parse_concurrency(concurrency),
        rollouts=rollouts,
        minutes=minutes,
        head=head,
        model=model,
        split=split,
        attempts=attempts,
    )
    try:
        sound = run_until_signal(_print_measurements(plan, json=json))
    except Stopped as stop:
        raise typer.Exit(stop.code) from None
    if not sound:
        raise typer.Exit(1)


def _parse_concurrency(text: str) -> tuple[int, ...]:
    words = text.split(",")
    if not all(re.fullmatch("[1-9][0-9]{0,5}", word) for word in words):
        raise UsageError(f"--concurrency {text}: write positive integers, as in --concurrency 1,16,64")
    return tuple(map(int, words))


async def _print_measurements(plan: BenchPlan, *, json: bool) -> bool:
    """Print the result of each environment as soon as it is measured. Return whether all rollouts were correct."""
    from contextlib import aclosing, redirect_stdout

    from gymsdk.bench.load import measure
    from gymsdk.cli.progress import show_warnings

    out, sound = sys.stdout, True
    with show_warnings(), redirect_stdout(sys.stderr):
        async with aclosing(measure(plan, lambda text: typer.echo(text, err=True))) as results:
            async for each in results:
                typer.echo(each.model_dump_json() if json else _format_text(each), file=out)
                out.flush()
                sound = sound and all(load.is_correct for load in each.loads)
    return sound


def _format_text(served: BenchResult) -> str:

    return format_table(served)


def format_table(served: BenchResult) -> str:
    """Return the results as a table with a column per load, followed by the problems."""
    columns = [dict(_format_metrics(each)) for each in served.loads]
    names = list(dict.fromkeys(name for column in columns for name in column))
    cells = [["at once", *(str(each.concurrency) for each in served.loads)]]
    cells += [[name, *(column.get(name, "") for column in columns)] for name in names]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        [*_format_header(served), *(_format_row(row, widths) for row in cells), *_format_problems(served.loads), ""]
    )


def _format_header(served: BenchResult) -> Iterator[str]:
    yield f"{served.environment}: played by {served.model or 'an unknown model'}"
    if served.ready is not None:
        yield f"ready in {served.ready:.2f} s ({served.ready_cpu:.2f} s of CPU), with {served.ready_memory:.0f} MB"


def _format_row(row: Sequence[str], widths: Sequence[int]) -> str:
    first, *rest = zip(row, widths, strict=True)
    return "  ".join([f"{first[0]:<{first[1]}}", *(f"{cell:>{width}}" for cell, width in rest)]).rstrip()


def _format_metrics(load: LoadResult) -> Iterator[tuple[str, str]]:
    yield "rollouts", f"{load.rollouts:,}"
    yield "rollouts a second", f"{load.rate:,.1f}"
    if load.latency is not None:
        for name, value in load.latency:
            yield f"{name}, ms", f"{value:,.1f}"
    for name, milliseconds in load.cpu.items():
        yield f"CPU of the {name}, ms a rollout", f"{milliseconds:.2f}"
    for name, memory in load.memory.items():
        for when, megabytes in (("before", memory.before), ("halfway", memory.half), ("after", memory.after)):
            yield f"memory of the {name} {when}, MB", f"{megabytes:,.0f}"
    yield "model calls a rollout", f"{load.calls:.2f}"
    for name, number in load.requests.items():
        yield f"requests to {name} a rollout", f"{number:.2f}"
    if load.reward is not None:
        yield "mean reward", f"{load.reward:.3f}"
    if load.wrong is not None:
        yield "rewards unlike the recording's", f"{load.wrong:,}"
    for kind, count in load.failures.items():
        yield f"no reward: {kind}", f"{count:,}"
    yield "left open", f"{load.open:,}"


def _format_problems(loads: Sequence[LoadResult]) -> Iterator[str]:
    yield from dict.fromkeys(f"{kind}: {message}" for load in loads for kind, message in load.messages.items())
    for load in loads:
        if load.wrong and load.expected is not None and load.reward is not None:
            yield (
                f"WRONG REWARDS: with {load.concurrency} at once, {load.wrong} of {load.rollouts} rewards"
                f" differ from the recording;"
                f" the mean is {load.reward:.4f}, expected {load.expected:.4f}"
            )
    if any(load.wrong is None for load in loads):
        yield "the rewards are not checked: name the scripted policy that the servers play with --model"
