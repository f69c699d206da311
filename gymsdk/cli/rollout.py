"""`gymsdk rollout`: play many episodes and write the graded rollouts to a folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gymsdk.cli import options
from gymsdk.cli.fields import Changed, Given, Without, list_options, take_models
from gymsdk.cli.output import echo
from gymsdk.cli.process import Traceback
from gymsdk.config.model import Placement
from gymsdk.errors import UsageError, format_name
from gymsdk.models.options import ModelOptions
from gymsdk.rollouts.settings import Policy, Rows, RunLimits, RunOutput, Sampling, Servers
from gymsdk.settings import TASKS
from gymsdk.types import Budget
from gymsdk.working_folder import shorten_path

if TYPE_CHECKING:
    from gymsdk.config.model import Deployment
    from gymsdk.rollouts.plan import Plan
    from gymsdk.types import Model, Row


CHUNK_BYTES = 2**20
"""How much of metrics.json is read and printed at a time."""


@contextmanager
def _prepare(out: RunOutput, folder: Path) -> Iterator[Callable[[], None]]:
    """Yield a function that starts the viewer and the export of the run in *folder*, which end with the context."""
    from gymsdk.cli.export import run_exporter
    from gymsdk.cli.view import run_viewer

    with ExitStack() as stack:
        starts = [stack.enter_context(run_viewer(folder))] if out.view else []
        # The export ends first; the viewer may stay open.
        starts += [stack.enter_context(run_exporter(folder, out.export))] if out.export else []

        def start() -> None:
            for start_process in starts:
                start_process()

        yield start


@take_models
def rollout(  # noqa: PLR0913  # groups of options
    names: options.OptionalNames = None,
    *,
    servers: Servers,
    config: options.Configs = [],  # noqa: B006  # typer copies it
    dataset: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Play this dataset of the configuration instead of a split.", rich_help_panel=TASKS
        ),
    ] = None,
    rows: Annotated[Given[Rows], Changed(repeats={"layered": True, "shown": "1, or the dataset's num_repeats"})],
    settings: options.Settings = [],  # noqa: B006  # typer copies it
    sampling: Sampling,
    budget: Annotated[Budget, Without("output")],
    limits: RunLimits,
    policy: Policy,
    model_options: Given[ModelOptions],
    placement: Placement,
    out: RunOutput,
    traceback: Traceback = False,  # noqa: ARG001  # its callback does the work
    json: options.Json = False,
) -> None:
    """Play and grade many episodes.

    The command writes rollouts and metrics to a folder. With --head, running servers play the episodes.

    Examples:
        gymsdk rollout math --limit 20
        gymsdk rollout math --model vllm/NAME --base-url http://HOST:8000/v1
    """
    from gymsdk.cli.tasks import select_dataset
    from gymsdk.rollouts.plan import Plan

    head, agent, model = servers.head, servers.agent, policy.model
    limits = limits.model_copy(update={"timeout": model_options.pop("timeout")})
    row_options = {"--tasks": rows.get("tasks"), "--split": rows.get("split"), "--agent": agent, "NAME": names or None}
    has_model = model is not None or head is not None
    chosen = select_dataset(config, dataset, row_options, played=has_model) if config or dataset is not None else None
    environments = [chosen.environment] if chosen and head is None else list(names or [])
    if repeated := [name for name, count in Counter(environments).items() if count > 1]:
        raise UsageError(
            f"{repeated[0]} is named twice; name each environment once, and play tasks again with --repeats"
        )
    if chosen:
        rows = Given({"repeats": chosen.repeats, **rows, "tasks": chosen.path})
    if chosen and head is None:
        chosen.check_models()
    listed = {"--model": model, **list_options(ModelOptions, model_options)}
    if out.trajectories and head is not None:
        raise UsageError(
            "--trajectories: servers do not report the model calls of a rollout; leave out --trajectories, or play here"
            " without --head"
        )
    _check_head_options(head, environments, listed, tasks=rows.get("tasks"), settings=settings, agent=agent)
    sampled = options.build_sampling(sampling)
    configured = chosen if chosen and chosen.policy_model and head is None and model is None else None
    if configured:
        _check_model_options(listed)
    environment_settings = options.parse_settings(environments, settings)
    model_fields = {
        "model": (model or "scripted/oracle") if head is None else None,
        "model_options": options.read_model_options(model_options),
    }
    plan = Plan(
        environments={
            name: {**(chosen.settings if chosen else {}), **values} for name, values in environment_settings.items()
        },
        head=head,
        agent=chosen.agent if chosen and head else agent,
        sampling=sampled,
        budget=budget,
        **rows,
        **(configured.describe_model() if configured else model_fields),
    )
    played = configured.build_model() if configured else None
    plays_default = head is None and model is None and configured is None
    _check_replicas(placement, head=head, configured=configured is not None, trajectories=out.trajectories)
    _run_plan(plan, limits, out, played, placement, plays_default=plays_default, json=json)


def _check_model_options(model_options: dict[str, str | None]) -> None:
    """Raise `UsageError` if an option changes how the model of the configuration is called."""
    for option, value in model_options.items():
        if value is not None:
            raise UsageError(
                f"{f'{option} {value}'.rstrip()}: the configuration defines the model;"
                " change it there, or pass --model too"
            )


def _run_plan(
    plan: Plan,
    limits: RunLimits,
    out: RunOutput,
    model: Model | None,
    placement: Placement,
    *,
    plays_default: bool,
    json: bool,
) -> None:
    from gymsdk.cli import ray
    from gymsdk.cli.progress import check_run, choose_folder, run_rollouts
    from gymsdk.rollouts.run import Run

    names = list(plan.environments) or [Path(plan.tasks or "").stem]
    address = ray.find_address(placement.ray_address)
    # Not before: without an address, RAY_ADDRESS would count, which `none` switches off.
    address = None if address == ray.NO_CLUSTER else address
    replicas = _build_replicas(plan, limits, placement) if placement.replicas else None
    with choose_folder(out.output, names, resume=out.resume) as folder:
        run = Run(plan, folder, limits=limits, model=model, **out.run_options)
        if address is not None:
            check_run(run, replicas, address)
        with ray.connect_ray(address, placement.offload), _prepare(out, folder) as start:
            metrics = run_rollouts(run, replicas, start)
            _print(folder, metrics, plays_default=plays_default, json=json)
    if any(summary["failures"] or summary["complaint"] for summary in metrics):
        raise typer.Exit(1)


def _check_replicas(placement: Placement, *, head: str | None, configured: bool, trajectories: bool) -> None:
    """Raise `UsageError` if another option contradicts --replicas."""
    if not placement.replicas:
        return
    for option, is_set in {"--head": head is not None, "--config": configured, "--trajectories": trajectories}.items():
        if is_set:
            raise UsageError(f"--replicas and {option} cannot be combined; leave one of them out")
    from gymsdk.cli import ray

    if ray.find_address(placement.ray_address) in {None, ray.NO_CLUSTER}:
        raise UsageError(f"--replicas {placement.replicas}: Ray places replicas; name a cluster with --ray-address")


def _build_replicas(plan: Plan, limits: RunLimits, placement: Placement) -> Deployment:
    """Return the deployment whose replicas play *plan*."""
    from gymsdk.config.model import Deployment, ModelServerConfig

    assert plan.model is not None, "only the servers of a head have a model of their own"
    model = ModelServerConfig(name=plan.model, options={**plan.model_options, "timeout": limits.timeout})
    return Deployment(environments=plan.environments, model=model, **placement.model_dump(exclude={"ray_address"}))


def _check_head_options(
    head: str | None,
    names: list[str],
    model_options: dict[str, str | None],
    *,
    tasks: Path | None,
    settings: list[str],
    agent: str | None,
) -> None:
    """Raise `UsageError` if options contradict who plays: this process, or the servers of *head*."""
    if agent is not None and (head is None or tasks is None):
        raise UsageError(
            f"--agent {agent} applies to rows of a file that servers play; pass --head and --tasks too, or leave it out"
        )
    if head is None:
        if not names:
            raise UsageError("Missing argument 'NAME': name the environments to play; `gymsdk list` shows them")
        return
    for option, value in model_options.items():
        if value is not None:
            servers = f"the servers at {head.rpartition('@')[2]}"
            raise UsageError(
                f"{f'{option} {value}'.rstrip()}: {servers} use the model they were started with;"
                f" leave out {option}, or play in this process without --head"
            )
    if tasks is None and not names:
        raise UsageError("--head: name the environments to play, or pass a file of rows with --tasks")
    if tasks is not None and settings:
        name = format_name(settings[0].partition("=")[0])
        raise UsageError(
            f"--set {name}: running servers have their settings already, and the rows come from {tasks};"
            " leave out --set, and pass it to `gymsdk serve`"
        )


def _print(folder: Path, metrics: list[Row], *, plays_default: bool, json: bool) -> None:
    from gymsdk.cli.progress import format_metrics_table, list_files

    if json:
        for piece in _iter_json(folder):
            echo(piece, nl=False)
        return
    echo(format_metrics_table(metrics))
    if plays_default:
        echo("scripted/oracle, the environment's own solution, has played; evaluate a model with --model")
    for path in list_files(folder):
        echo(shorten_path(path))
    failed = sum(sum(summary["failures"].values()) for summary in metrics)
    retry_hint = f"the same command with --output {shorten_path(folder)} --resume plays them again"
    raised = sum(summary["failures_raised"] for summary in metrics)
    if raised:
        cause = f"{raised} of {failed} rollouts without a reward: the environment's own code raised an exception"
        typer.echo(f"{cause}; fix the lines that the table names, then {retry_hint}", err=True)
    retryable = sum(summary["failures_retryable"] for summary in metrics)
    if retryable > raised:
        typer.echo(
            f"{retryable - raised} of {failed} rollouts without a reward may succeed on a retry; {retry_hint}", err=True
        )
    if open_ := failed - retryable - sum(summary["failures_for_good"] for summary in metrics):
        typer.echo(
            f"{open_} of {failed} rollouts without a reward fail again until the cause is fixed; then {retry_hint}",
            err=True,
        )


def _iter_json(folder: Path) -> Iterator[bytes]:
    """Yield the pieces of the JSON output: the folder, and the content of its metrics.json, which may be large."""
    from gymsdk import jsonl
    from gymsdk.rollouts.folder import RunFolder

    head = jsonl.dump_portable_json({"output": str(shorten_path(folder))}, indent=True).removesuffix(b"\n}")
    yield head + b',\n  "environments": '
    metrics = RunFolder(folder).metrics
    # Without the line break at the end.
    remaining = metrics.stat().st_size - 1
    with metrics.open("rb") as file:
        while chunk := file.read(min(CHUNK_BYTES, remaining)):
            remaining -= len(chunk)
            yield chunk.replace(b"\n", b"\n  ")
    yield b"\n}\n"
