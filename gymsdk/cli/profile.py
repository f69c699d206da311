"""`gymsdk profile`: estimate from a model's rollouts what training on an environment would learn."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from gymsdk.cli import options
from gymsdk.cli.fields import Changed, Given, Without, take_models
from gymsdk.cli.output import echo
from gymsdk.cli.process import Traceback
from gymsdk.models.options import ModelOptions
from gymsdk.rollouts.settings import Policy, Rows, RunLimits, RunOutput, Sampling
from gymsdk.settings import OUTPUT
from gymsdk.types import Budget
from gymsdk.working_folder import shorten_path

if TYPE_CHECKING:
    from pathlib import Path

    from gymsdk.rollouts.folder import RunFolder
    from gymsdk.rollouts.plan import Plan
    from gymsdk.rollouts.profile import Profile


@take_models
def profile(  # noqa: PLR0913  # groups of options
    name: Annotated[str, typer.Argument(help="The environment.")],
    *,
    rows: Annotated[Rows, Changed(limit={"default": 100, "help": "Play at most N tasks."}, repeats={"default": 8})],
    settings: options.Settings = [],  # noqa: B006  # typer copies it
    sampling: Sampling,
    budget: Annotated[Budget, Without("output")],
    limits: RunLimits,
    policy: Annotated[Policy, Changed(model={"default": "scripted/oracle:0.7", "shown": True})],
    model_options: Given[ModelOptions],
    out: Annotated[RunOutput, Without("trajectories", "view", "export")],
    plot: Annotated[
        bool,
        typer.Option(help="Draw profile.png if gymsdk[plot] is installed.", rich_help_panel=OUTPUT),
    ] = True,
    traceback: Traceback = False,  # noqa: ARG001  # its callback does the work
    json: options.Json = False,
) -> None:
    """Estimate what training on an environment would learn.

    The command plays every task several times with a model.

    Examples:
        gymsdk profile math --model vllm/Qwen/Qwen3-4B
        gymsdk profile math --limit 20 --repeats 4 --output profile
    """
    from gymsdk.cli.progress import choose_folder, run_rollouts
    from gymsdk.rollouts.plan import Plan
    from gymsdk.rollouts.run import Run

    limits = limits.model_copy(update={"timeout": model_options.pop("timeout")})
    plan = Plan(
        environments=options.parse_settings([name], settings),
        model=policy.model,
        model_options=options.read_model_options(model_options),
        sampling=options.build_sampling(sampling),
        budget=budget,
        **dict(rows),
    )
    # Asked before the rollouts are played, which may take hours.
    plot = plot and _has_matplotlib()
    with choose_folder(out.output, ["profile", name], resume=out.resume) as folder:
        run_rollouts(Run(plan, folder, limits=limits, **out.run_options))
        result = _profile_run(plan, folder, plot=plot)
    echo(
        result.model_dump_json(indent=2).encode()
        if json
        else "\n".join([*_format_profile(result), *_list_output_paths(folder, plot=plot)])
    )
    if result.failures:
        raise typer.Exit(1)


def _has_matplotlib() -> bool:
    """Return whether matplotlib is installed, and print a note if it is not."""
    from importlib.util import find_spec

    if find_spec("matplotlib") is not None:
        return True
    typer.echo("no plot is drawn because matplotlib is not installed; run `pip install 'gymsdk[plot]'`", err=True)
    return False


def _profile_run(plan: Plan, folder: Path, *, plot: bool) -> Profile:
    from itertools import chain

    from gymsdk.rollouts.folder import RunFolder
    from gymsdk.rollouts.profile import build_profile, draw_profile

    name = next(iter(plan.environments))
    with RunFolder(folder) as run:
        maxima = _list_claimed_maxima(plan, run)
        rollouts = chain(run.read_rollouts(), run.read_failures())
        result = build_profile(name, plan.model or "", rollouts, maxima=maxima)
        (folder / "profile.json").write_text(result.model_dump_json(indent=2) + "\n", encoding="utf-8")
        if plot:
            draw_profile(result, folder / "profile.png")
    return result


def _list_claimed_maxima(plan: Plan, run: RunFolder) -> dict[int, float]:
    """Return the maximum reward that the environment claims for each task of the run, by task index."""
    from gymsdk.cli.process import run_in_new_loop
    from gymsdk.line import TASK_INDEX
    from gymsdk.plugins import registry

    name, settings = next(iter(plan.environments.items()))
    environment = registry.load(name, **settings)

    async def list_maxima() -> dict[int, float]:
        rows = run.read_inputs()
        return {row[TASK_INDEX]: (await environment.claims(environment.read(row))).maximum for row in rows}

    return run_in_new_loop(list_maxima())


def _list_output_paths(folder: Path, *, plot: bool) -> Iterator[str]:
    from gymsdk.cli.progress import list_files
    from gymsdk.rollouts.folder import PROFILE_FILES

    paths = [folder / name for name in PROFILE_FILES if plot or not name.endswith(".png")]
    return (str(shorten_path(path)) for path in (*paths, *list_files(folder)))


def _format_profile(profile: Profile) -> Iterator[str]:
    """Yield the lines of the profile as text, the verdict first."""
    yield typer.style(profile.verdict, bold=True)
    if mean := profile.reward:
        yield f"mean reward        {mean.value:6.3f}   (95 %: {mean.low:.3f} to {mean.high:.3f})"
    for k, estimate in profile.passes.items():
        yield f"pass@{k:<13} {estimate.value:6.1%}   (95 %: {estimate.low:.1%} to {estimate.high:.1%})"
    if profile.flat is not None:
        yield f"groups all alike   {profile.flat:6.1%}   (a group-based trainer learns nothing from them)"
    yield f"tasks              {profile.tasks:6}"
    for band, count in profile.bands.items():
        yield f"  {band:<16} {count:6}"
    yield "rewards"
    max_count = max((bar.count for bar in profile.rewards), default=1)
    for bar in profile.rewards:
        yield f"  {bar.low:5.2f} to {bar.high:5.2f}   {bar.count:6}  {'█' * round(30 * bar.count / max_count)}".rstrip()
    if profile.grading:
        yield f"verify             {profile.grading['p50']:6.1f} ms (p50), {profile.grading['p99']:.1f} ms (p99)"
    if profile.tokens is not None and profile.turns is not None:
        yield f"tokens per turn    {profile.tokens:6.0f}   ({profile.turns:.1f} turns per rollout)"
    for kind, count in profile.failures.items():
        yield f"failed: {kind}: {count}"
