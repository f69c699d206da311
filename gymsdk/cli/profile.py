"""`gymsdk profile`: what a model's rollouts say about an environment, before a training run is paid for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gymsdk.cli import options
from gymsdk.cli.rollout import carried_out, dated

if TYPE_CHECKING:
    from gymsdk.profile import Profile


def profile(  # noqa: PLR0913  # each is an option of the command
    name: Annotated[str, typer.Argument(help="The environment.")],
    *,
    model: options.Model = "scripted/oracle:0.7",
    base_url: options.BaseUrl = None,
    api: options.Api = None,
    tasks: Annotated[Path | None, typer.Option(help="A JSONL file of task rows, instead of a split.")] = None,
    split: options.Split = None,
    limit: Annotated[int, typer.Option(min=1, help="Take this many tasks.")] = 100,
    repeats: Annotated[int, typer.Option("--repeats", "-k", min=1, help="Play each task this often.")] = 8,
    concurrency: Annotated[int, typer.Option(min=1, help="Episodes in flight at once.")] = 64,
    seed: options.Seed = 0,
    settings: options.Set = [],  # noqa: B006  # typer copies it
    temperature: Annotated[float | None, typer.Option(min=0.0)] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="The folder to write.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in the folder.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run in the folder.")] = False,
    plot: Annotated[bool, typer.Option(help="Draw profile.png (needs gymsdk[plot]).")] = True,
    json: Annotated[bool, typer.Option("--json", help="Print the profile as JSON.")] = False,
) -> None:
    """Play every task several times and say what training on it would learn from."""
    from gymsdk.cli.progress import Progress
    from gymsdk.plan import Plan
    from gymsdk.run import Run

    plan = Plan(
        environments=options.settings([name], settings),
        model=model,
        base_url=base_url,
        api=api,
        tasks=tasks,
        split=split,
        limit=limit,
        repeats=repeats,
        seed=seed,
        sampling=options.sampling(temperature=temperature, top_p=None, max_output_tokens=None, params=()),
    )
    folder = output or dated(["profile", name])
    if plot:
        _must_draw()
    with Progress() as watch:
        run = Run(plan, folder, watch, resume=resume, overwrite=overwrite, at_once=concurrency)
        carried_out(run)
    _conclude(name, model, folder, plot=plot, json=json)


def _must_draw() -> None:
    from importlib.util import find_spec

    from gymsdk.errors import UsageError

    if find_spec("matplotlib") is None:
        raise UsageError("the plot needs matplotlib: `pip install 'gymsdk[plot]'`, or leave it out with --no-plot")


def _conclude(name: str, model: str, folder: Path, *, plot: bool, json: bool) -> None:
    from gymsdk.folder import RunFolder
    from gymsdk.plot import draw
    from gymsdk.profile import profiled

    with RunFolder(folder) as run:
        found = profiled(name, model, list(run.read_rollouts()), list(run.read_failures()))
    (folder / "profile.json").write_text(found.model_dump_json(indent=2) + "\n")
    if plot:
        draw(found, folder / "profile.png")
    if json:
        typer.echo(found.model_dump_json(indent=2))
        return
    _print(found)
    for file in ("profile.json", *(["profile.png"] if plot else []), "rollouts.jsonl"):
        typer.echo(folder / file)


def _print(found: Profile) -> None:
    from gymsdk.profile import verdict

    typer.secho(verdict(found), bold=True)
    if found.reward:
        mean = found.reward
        typer.echo(f"mean reward          {mean.value:.3f} (95 %: {mean.low:.3f} to {mean.high:.3f})")
    if found.flat is not None:
        typer.echo(f"groups all alike     {found.flat:.0%} of {found.tasks}")
    for band, count in found.bands.items():
        typer.echo(f"  {band:<18} {count}")
    for k, each in found.passes.items():
        typer.echo(f"pass@{k:<15} {each.value:6.1%} (95 %: {each.low:.1%} to {each.high:.1%})")
    if found.grading:
        typer.echo(f"verify               p50 {found.grading['p50']:.1f} ms, p99 {found.grading['p99']:.1f} ms")
    if found.tokens is not None:
        typer.echo(f"tokens per turn      {found.tokens:.0f}")
    for kind, count in found.failures.items():
        typer.echo(f"failed: {kind}: {count}")
