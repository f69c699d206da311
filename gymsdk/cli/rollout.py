"""`gymsdk rollout`: play many episodes and put graded rollouts on disk."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gymsdk.cli import options

if TYPE_CHECKING:
    from gymsdk.run import Run


def rollout(  # noqa: PLR0913  # each is an option of the command
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="One or more environments.")],
    *,
    model: options.Model = "scripted/oracle",
    base_url: options.BaseUrl = None,
    api: options.Api = None,
    tasks: Annotated[Path | None, typer.Option(help="A JSONL file of task rows, instead of a split.")] = None,
    split: options.Split = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Take this many tasks (a split: 100).")] = None,
    repeats: Annotated[int, typer.Option("--repeats", "-k", min=1, help="Play each task this often.")] = 1,
    concurrency: Annotated[int, typer.Option(min=1, help="Episodes in flight at once.")] = 64,
    seed: options.Seed = 0,
    settings: options.Set = [],  # noqa: B006  # typer copies it
    temperature: Annotated[float | None, typer.Option(min=0.0)] = None,
    top_p: Annotated[float | None, typer.Option(min=0.0, max=1.0)] = None,
    max_output_tokens: Annotated[int | None, typer.Option(min=1)] = None,
    param: Annotated[
        list[str], typer.Option(metavar="KEY=JSON", help="A further request parameter.", show_default=False)
    ] = [],  # noqa: B006  # typer copies it
    turns: Annotated[int, typer.Option(min=1, help="Model calls an episode may make.")] = 32,
    tool_calls: Annotated[int, typer.Option(min=0, help="Tool calls an episode may make.")] = 128,
    deadline: Annotated[float, typer.Option(min=0.001, help="Seconds an episode may take.")] = 600.0,
    attempts: Annotated[int, typer.Option(min=1, help="Tries of an episode that failed.")] = 3,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds one model call may take.")] = 300.0,
    skip_bad_rows: Annotated[bool, typer.Option("--skip-bad-rows", help="Leave out rows that do not fit.")] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="The folder to write.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in the folder.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run in the folder.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Play episodes with a model, grade them, and write rollouts and figures to a folder."""
    from gymsdk.cli.progress import Progress
    from gymsdk.episode import Budget
    from gymsdk.plan import Plan
    from gymsdk.run import Run

    plan = Plan(
        environments=options.settings(names, settings),
        model=model,
        base_url=base_url,
        api=api,
        tasks=tasks,
        split=split,
        limit=limit,
        skip_bad_rows=skip_bad_rows,
        repeats=repeats,
        seed=seed,
        sampling=options.sampling(
            temperature=temperature, top_p=top_p, max_output_tokens=max_output_tokens, params=param
        ),
        budget=Budget(turns=turns, tools=tool_calls, seconds=deadline),
    )
    with Progress() as watch:
        run = Run(
            plan=plan,
            output=output or dated(names),
            watch=watch,
            resume=resume,
            overwrite=overwrite,
            at_once=concurrency,
            attempts=attempts,
            timeout=timeout,
        )
        figures = carried_out(run)
    _print(run, figures, json=json)
    if any(each["failures"] for each in figures):
        raise typer.Exit(1)


def dated(names: list[str]) -> Path:
    """Give the folder a run goes to where none is named."""
    return Path("rollouts") / f"{'-'.join(names)}-{time.strftime('%Y%m%d-%H%M%S')}"


def carried_out(run: Run) -> list[dict[str, object]]:
    """Play *run*; Ctrl-C leaves it resumable and says how."""
    import asyncio

    from gymsdk.run import carry_out

    try:
        return asyncio.run(carry_out(run))
    except KeyboardInterrupt:
        typer.echo(f"Stopped; what has finished is in {run.output}. Go on with the same command and", err=True)
        typer.echo(f"  --output {run.output} --resume", err=True)
        raise typer.Exit(130) from None


def _print(run: Run, figures: list[dict[str, object]], *, json: bool) -> None:
    import orjson

    from gymsdk.cli.table import table

    if json:
        typer.echo(orjson.dumps({"output": str(run.output), "environments": figures}, option=orjson.OPT_INDENT_2))
        return
    table(figures)
    for path in sorted(run.output.glob("*.json*")):
        typer.echo(path)
