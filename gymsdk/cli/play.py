"""`gymsdk play`: one episode in the terminal, played by a person or a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gymsdk.cli import options

if TYPE_CHECKING:
    from gymsdk.environment import Environment
    from gymsdk.outcome import Rollout
    from gymsdk.types import Model, Row


def play(  # noqa: PLR0913  # each is an option of the command
    name: Annotated[str, typer.Argument(help="The environment.")],
    *,
    model: Annotated[str | None, typer.Option(help="Who plays, as PROVIDER/NAME; you, if none is named.")] = None,
    base_url: options.BaseUrl = None,
    api: options.Api = None,
    tasks: Annotated[Path | None, typer.Option(help="A JSONL file of task rows, instead of a split.")] = None,
    split: options.Split = None,
    task: Annotated[int, typer.Option(min=0, help="Which task, counted from 0.")] = 0,
    seed: options.Seed = 0,
    settings: options.Set = [],  # noqa: B006  # typer copies it
    json: Annotated[bool, typer.Option("--json", help="Print the rollout as JSON, and nothing else.")] = False,
) -> None:
    """Play one episode and show its verdict."""
    import asyncio

    from gymsdk.cli.person import Person, Shown
    from gymsdk.models import registry as models
    from gymsdk.plugins import registry

    environment = registry.load(name, **options.settings([name], settings)[name])
    row = _row(environment, tasks, split, seed, task)
    player: Model = models.model(model, base_url=base_url, api=api) if model else Person()
    rollout = asyncio.run(_played(environment, Shown(player) if model and not json else player, row, seed))
    _print(rollout, json=json)
    if rollout.failure:
        raise typer.Exit(1)


def _row(environment: Environment, tasks: Path | None, split: str | None, seed: int, task: int) -> Row:
    from itertools import islice

    from gymsdk.errors import UsageError
    from gymsdk.sources import from_file, from_splits

    named = {environment.name: environment}
    rows = (
        from_splits(named, split, seed=seed, limit=task + 1)
        if tasks is None
        else from_file(named, tasks, limit=task + 1)
    )
    found = next(islice(rows, task, None), None)
    if found is None:
        raise UsageError(f"there is no task {task}: {tasks or split or 'the split'} has fewer")
    return found


async def _played(environment: Environment, model: Model, row: Row, seed: int) -> Rollout:
    from gymsdk import http
    from gymsdk.episode import Budget, play
    from gymsdk.jobs import jobs, seed_of

    job = next(jobs([row], repeats=1))
    try:
        async with environment:
            budget = Budget(seconds=86_400)
            return await play(environment, model, job.row, seed=seed_of(seed, job), id=job.id, budget=budget)
    finally:
        await http.aclose()


def _print(rollout: Rollout, *, json: bool) -> None:
    if json:
        typer.echo(rollout.model_dump_json(indent=2))
    elif rollout.failure:
        typer.secho(f"{rollout.outcome} in {rollout.failure.stage}: {rollout.failure.message}", fg="red")
    else:
        typer.secho(f"reward {rollout.reward:g}", bold=True, nl=False)
        typer.echo(f" (ended: {rollout.ended}; {rollout.turns} turns; {rollout.timing.total:.0f} ms)")
        for key, value in rollout.components.items():
            typer.echo(f"  {key}: {value:g}")
        fields = rollout.verdict.model_dump(mode="json") if rollout.verdict else {}
        for key, value in fields.items():
            if key not in {"reward", "components"}:
                typer.echo(f"  {key}: {value}")
