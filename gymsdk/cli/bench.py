"""`gymsdk bench`: what served environments cost and bear."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from gymsdk.cli import options
from gymsdk.errors import UsageError

if TYPE_CHECKING:
    from gymsdk.bench.bench import Bench
    from gymsdk.bench.figures import Served


def bench(  # noqa: PLR0913  # each is an option of the command
    names: Annotated[
        list[str], typer.Argument(metavar="NAME...", help="One or more environments.", show_default=False)
    ],
    *,
    head: options.Head = None,
    rollouts: Annotated[int, typer.Option(min=1, metavar="N", help="Rollouts of each load.")] = 200,
    minutes: Annotated[
        float | None,
        typer.Option(min=0.01, metavar="M", callback=options.finite, help="Let each load last so long instead."),
    ] = None,
    at_once: Annotated[str, typer.Option(metavar="C[,C...]", help="Rollouts in flight, one load for each number.")] = (
        "1,16,64"
    ),
    model: Annotated[
        str | None,
        typer.Option(
            metavar="scripted/NAME",
            help="Who plays in the servers' process; with --head, whom rewards are held to.",
            show_default="an endpoint that replays scripted/oracle",
        ),
    ] = None,
    split: options.Split = None,
    settings: options.Set = [],  # noqa: B006  # typer copies it
    attempts: Annotated[int, typer.Option(min=1, metavar="N", help="Tries of a rollout that failed.")] = 1,
    json: options.Json = False,
) -> None:
    """Ask servers for rollouts, so many in flight, and tell what that takes.

    Without --head, the servers of each environment are started and ended here, in processes of their own.
    """
    from gymsdk.bench.bench import Bench
    from gymsdk.cli.stopping import Stopped, until_stopped

    asked = Bench(
        environments=options.settings(names, settings),
        at_once=_numbers(at_once),
        rollouts=rollouts,
        minutes=minutes,
        head=head,
        model=model,
        split=split,
        attempts=attempts,
    )
    try:
        sound = until_stopped(_measured(asked, json=json))
    except Stopped as stop:
        raise typer.Exit(stop.code) from None
    if not sound:
        raise typer.Exit(1)


def _numbers(text: str) -> tuple[int, ...]:
    words = text.split(",")
    if not all(re.fullmatch("[1-9][0-9]{0,5}", word) for word in words):
        raise UsageError(f"--at-once {text}: write it as numbers from 1 on, as in --at-once 1,16,64")
    return tuple(map(int, words))


async def _measured(asked: Bench, *, json: bool) -> bool:
    """Print what is found, each environment as soon as it has been measured; give whether all went well."""
    from contextlib import aclosing, redirect_stdout

    from gymsdk.bench.bench import measured
    from gymsdk.cli.running import warnings

    out, sound = sys.stdout, True
    with warnings(), redirect_stdout(sys.stderr):
        async with aclosing(measured(asked, lambda told: typer.echo(told, err=True))) as found:
            async for each in found:
                typer.echo(each.model_dump_json() if json else _text(each), file=out)
                out.flush()
                sound = sound and all(load.is_correct for load in each.loads)
    return sound


def _text(served: Served) -> str:
    from gymsdk.cli.load_table import text

    return text(served)
