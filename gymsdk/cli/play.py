"""`gymsdk play`: one episode in the terminal, played by a person or a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from gymsdk.cli import options
from gymsdk.cli.tracebacks import Traceback

if TYPE_CHECKING:
    from pathlib import Path

    from gymsdk.environment import Environment
    from gymsdk.outcome import Rollout
    from gymsdk.types import Model, Row

SITTING = 86_400.0
"""Seconds a person may take."""

SOUGHT = 100_000
"""Among how many tasks of a split one is looked for: a split may have no end."""


def play(  # noqa: PLR0913  # each is an option of the command
    name: Annotated[str, typer.Argument(help="The environment.")],
    *,
    model: Annotated[
        str | None, typer.Option(metavar="PROVIDER/NAME", help="Who plays; you, if none is named.")
    ] = None,
    base_url: options.BaseUrl = [],  # noqa: B006  # typer copies it
    api: options.Api = None,
    pin: options.Pin = [],  # noqa: B006  # typer copies it
    token_ids: options.TokenIds = False,
    tasks: options.Tasks = None,
    split: options.Split = None,
    task: Annotated[int, typer.Option(min=0, metavar="N", help="Which task, counted from 0.")] = 0,
    seed: options.Seed = 0,
    settings: options.Set = [],  # noqa: B006  # typer copies it
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    max_output_tokens: options.MaxOutputTokens = None,
    param: options.Param = [],  # noqa: B006  # typer copies it
    gym: Annotated[bool, typer.Option("--gym", help="Play it through Gymnasium: gymnasium.make, reset, step.")] = False,
    traceback: Traceback = False,  # noqa: ARG001  # its callback does the work
    json: Annotated[
        bool, typer.Option("--json", help="Print the rollout as JSON, all else to standard error.")
    ] = False,
) -> None:
    """Play one episode and show its verdict."""
    from functools import partial

    from gymsdk.cli.person import Person, Shown
    from gymsdk.cli.stopping import Stopped, interruptible, until_stopped
    from gymsdk.models import registry as models
    from gymsdk.plugins import registry
    from gymsdk.rollouts.jobs import stamped
    from gymsdk.rollouts.sources import one_source

    one_source(tasks, split)
    configured = options.settings([name], settings)[name]
    environment = registry.load(name, **configured)
    sampling = options.sampling(temperature=temperature, top_p=top_p, max_output_tokens=max_output_tokens, params=param)
    row = stamped(_row(environment, tasks, split, seed, task), environment=name, task=task, sampling=sampling)
    player: Model = Person(aside=json)
    if model:
        pinned = options.pinned(pin)
        named = models.model(model, base_url=options.addresses(base_url), api=api, pinned=pinned, tokens=token_ids)
        player = Shown(named, aside=json)
    try:
        if gym:
            rollout = interruptible(partial(_through_gymnasium, name, configured, player, row, seed))
        else:
            rollout = until_stopped(_played(environment, player, row, seed))
    except Stopped as stop:
        raise typer.Exit(stop.code) from None
    _print(rollout, json=json)
    if rollout.failure:
        raise typer.Exit(1)


def _row(environment: Environment, tasks: Path | None, split: str | None, seed: int, task: int) -> Row:
    from itertools import islice

    from gymsdk.errors import BadRow
    from gymsdk.rollouts.sources import default_split, from_file, from_splits

    if tasks is None and task >= SOUGHT:
        advice = "write the rows with `gymsdk tasks` and name them with --tasks"
        raise BadRow(f"--task {task} is beyond the first {SOUGHT:,} tasks of a split; take a lower one, or {advice}")
    named = {environment.name: environment}
    if tasks is None:
        split = split or default_split(environment)
        found = from_splits(named, split, seed=seed, limit=task + 1)
    else:
        found = from_file(named, tasks, limit=task + 1)
    for _, row in islice(found, task, None):
        return row
    raise BadRow(f"--task {task}: {tasks or f'split {split!r}'} has no task with that number; they count from 0")


async def _played(environment: Environment, model: Model, row: Row, seed: int) -> Rollout:
    from gymsdk import http
    from gymsdk.episode import play
    from gymsdk.rollouts.jobs import jobs, seed_of
    from gymsdk.sitting import Budget

    job = next(jobs([row]))
    budget = Budget(seconds=SITTING)
    try:
        async with environment:
            return await play(environment, model, job.row, seed=seed_of(seed, job), id=job.id, budget=budget)
    finally:
        await http.aclose()


def _through_gymnasium(name: str, settings: dict[str, Any], model: Model, row: Row, seed: int) -> Rollout:
    from gymsdk import http
    from gymsdk.gym import loop
    from gymsdk.gym.policy import made, rollout
    from gymsdk.rollouts.jobs import jobs, seed_of

    job = next(jobs([row]))
    env = made(name, seconds=SITTING, settings=settings)
    try:
        played = rollout(env, model, seed=seed_of(seed, job), options={"task": job.row}, timeout=SITTING)
    finally:
        env.close()
        loop.run(http.aclose())
    return played.model_copy(update={"id": job.id, "row": job.row})


def _print(rollout: Rollout, *, json: bool) -> None:
    if json:
        typer.echo(rollout.model_dump_json(indent=2))
    elif rollout.failure:
        failure = rollout.failure
        typer.secho(f"{rollout.outcome} in {failure.stage} ({failure.kind}): {failure.message}", fg="red")
    else:
        typer.secho(f"reward {rollout.reward:g}", bold=True, nl=False)
        turns = "1 turn" if rollout.turns == 1 else f"{rollout.turns} turns"
        typer.echo(f" (ended: {rollout.ended}; {turns}; {rollout.timing.total:.0f} ms)")
        fields = rollout.verdict.model_dump(mode="json", exclude={"reward", "components"}) if rollout.verdict else {}
        for key, value in {**rollout.components, **fields}.items():
            typer.echo(f"  {key}: {value:g}" if isinstance(value, float) else f"  {key}: {value}")
