"""`gymsdk rollout`: play many episodes and put graded rollouts on disk."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from gymsdk.cli import options
from gymsdk.errors import UsageError

if TYPE_CHECKING:
    from gymsdk.rollouts.plan import Plan
    from gymsdk.rollouts.run import Pace
    from gymsdk.types import Row


def rollout(  # noqa: PLR0913  # each is an option of the command
    names: options.NamesIfAny = None,
    *,
    head: options.Head = None,
    model: options.ModelIfAny = None,
    base_url: options.BaseUrl = [],  # noqa: B006  # typer copies it
    api: options.Api = None,
    pin: options.Pin = [],  # noqa: B006  # typer copies it
    token_ids: options.TokenIds = False,
    tasks: options.Tasks = None,
    split: options.Split = None,
    limit: options.Limit = None,
    repeats: options.Repeats = 1,
    concurrency: options.Concurrency = 64,
    seed: options.Seed = 0,
    settings: options.Set = [],  # noqa: B006  # typer copies it
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    max_output_tokens: options.MaxOutputTokens = None,
    param: options.Param = [],  # noqa: B006  # typer copies it
    turns: options.Turns = 32,
    tool_calls: options.ToolCalls = 128,
    deadline: options.Deadline = 600.0,
    attempts: options.Attempts = 3,
    timeout: options.Timeout = 300.0,
    skip_bad_rows: options.SkipBadRows = False,
    output: options.Output = None,
    resume: options.Resume = False,
    overwrite: options.Overwrite = False,
    json: options.Json = False,
) -> None:
    """Play and grade many episodes.

    Rollouts and figures go to a folder. With --head, running servers play.
    """
    from gymsdk.rollouts.plan import Plan
    from gymsdk.rollouts.run import Pace
    from gymsdk.sitting import Budget

    named = list(dict.fromkeys(names or []))
    theirs = {
        "--model": model,
        "--base-url": options.addresses(base_url),
        "--api": api,
        "--pin": ",".join(pin) or None,
        "--token-ids": "" if token_ids else None,
    }
    _played_by(head, named, theirs, tasks=tasks, settings=settings)
    sampled = options.sampling(temperature=temperature, top_p=top_p, max_output_tokens=max_output_tokens, params=param)
    plan = Plan(
        environments=options.settings(named, settings),
        model=(model or "scripted/oracle") if head is None else None,
        head=head,
        base_url=options.addresses(base_url),
        api=api,
        pinned=options.pinned(pin),
        tokens=token_ids,
        tasks=tasks,
        split=split,
        limit=limit,
        skip_bad_rows=skip_bad_rows,
        repeats=repeats,
        seed=seed,
        sampling=sampled,
        budget=Budget(turns=turns, tools=tool_calls, seconds=deadline),
    )
    pace = Pace(at_once=concurrency, attempts=attempts, timeout=timeout)
    _carry_out(plan, pace, output, resume=resume, overwrite=overwrite, json=json)


def _carry_out(plan: Plan, pace: Pace, output: Path | None, *, resume: bool, overwrite: bool, json: bool) -> None:
    from gymsdk.cli.running import carried_out, folder_of
    from gymsdk.rollouts.run import Run

    folder = folder_of(output, list(plan.environments) or [Path(plan.tasks or "").stem], resume=resume)
    figures = carried_out(Run(plan, folder, resume=resume, overwrite=overwrite, pace=pace))
    _print(folder, figures, json=json)
    if any(each["failures"] or each["complaint"] for each in figures):
        raise typer.Exit(1)


def _played_by(
    head: str | None, names: list[str], given: dict[str, str | None], *, tasks: Path | None, settings: list[str]
) -> None:
    """Refuse what does not go together with who plays: this process, or the servers of *head*."""
    if head is None:
        _named(names)
        return
    _theirs(head, given)
    _rows_of(names, tasks, settings)


def _named(names: list[str]) -> None:
    if not names:
        raise UsageError("Missing argument 'NAME': say which environments are played; `gymsdk list` names them")


def _theirs(head: str, given: dict[str, str | None]) -> None:
    for option, value in given.items():
        if value is not None:
            servers = f"the servers at {head.rpartition('@')[2]}"
            raise UsageError(
                f"{f'{option} {value}'.rstrip()}: {servers} play with the model they were started with;"
                f" leave out {option}, or play here without --head"
            )


def _rows_of(names: list[str], tasks: Path | None, settings: list[str]) -> None:
    if tasks is None and not names:
        raise UsageError("--head: name the environments whose tasks are to be played, or a file of rows with --tasks")
    if tasks is not None and settings:
        raise UsageError(
            f"--set {settings[0]}: the servers have their settings, and the rows are those of {tasks};"
            " leave out --set, and give it to `gymsdk serve`"
        )


def _print(folder: Path, figures: list[Row], *, json: bool) -> None:
    from gymsdk import rows
    from gymsdk.cli.table import table
    from gymsdk.rollouts.folder import FILES

    if json:
        typer.echo(rows.document({"output": str(folder), "environments": figures}), nl=False)
        return
    typer.echo(table(figures))
    for path in filter(_has_something, (folder / name for name in FILES)):
        typer.echo(path)
    lost = sum(sum(each["failures"].values()) for each in figures)
    if open_ := lost - sum(each["failures_for_good"] for each in figures):
        advice = f"the same command with --output {folder} --resume tries them again"
        typer.echo(f"{open_} of {lost} without a reward may go well another time; {advice}", err=True)


def _has_something(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0
