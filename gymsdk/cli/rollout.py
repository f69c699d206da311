"""`gymsdk rollout`: play many episodes and write the graded rollouts to a folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gymsdk.cli import options
from gymsdk.cli.output import echo
from gymsdk.cli.process import Traceback
from gymsdk.errors import UsageError, format_name
from gymsdk.settings import OUTPUT
from gymsdk.working_folder import shorten_path

if TYPE_CHECKING:
    from gymsdk.config.model import Deployment
    from gymsdk.rollouts.plan import Plan
    from gymsdk.rollouts.run import RunLimits
    from gymsdk.types import Model, Row


BLOCK_BYTES = 2**20
"""How much of metrics.json is read and printed at a time."""


@dataclass(frozen=True)
class Beside:
    """The processes that run beside the rollouts.

    Attributes:
        view: Whether the viewer shows the run.
        export: The service that the run is sent to.
    """

    view: bool
    export: str | None

    @contextmanager
    def prepare(self, folder: Path) -> Iterator[Callable[[], None]]:
        """Yield a function that starts the processes for the run in *folder*, which end with the context."""
        from gymsdk.cli.export import run_exporter
        from gymsdk.cli.view import run_viewer

        with ExitStack() as stack:
            starts = [stack.enter_context(run_viewer(folder))] if self.view else []
            # The export ends first; the viewer may stay open.
            starts += [stack.enter_context(run_exporter(folder, self.export))] if self.export else []

            def start() -> None:
                for each in starts:
                    each()

            yield start


def rollout(  # noqa: PLR0913  # each is an option of the command
    names: options.OptionalNames = None,
    *,
    head: options.Head = None,
    model: options.OptionalModelName = None,
    base_url: options.BaseUrl = [],  # noqa: B006  # typer copies it
    api: options.Api = None,
    pin: options.Pin = [],  # noqa: B006  # typer copies it
    token_ids: options.TokenIds = False,
    token_interface: options.TokenInterface = None,
    tokenizer: options.Tokenizer = None,
    config: options.Configs = [],  # noqa: B006  # typer copies it
    dataset: options.DatasetName = None,
    tasks: options.Tasks = None,
    agent: options.Agent = None,
    split: options.Split = None,
    limit: options.Limit = None,
    repeats: options.OptionalRepeats = None,
    concurrency: options.Concurrency = 64,
    seed: options.Seed = 0,
    settings: options.Settings = [],  # noqa: B006  # typer copies it
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    max_output_tokens: options.MaxOutputTokens = None,
    param: options.Param = [],  # noqa: B006  # typer copies it
    turns: options.Turns = 32,
    tool_calls: options.ToolCalls = 128,
    deadline: options.Deadline = 600.0,
    attempts: options.Attempts = 3,
    ray_address: options.RayAddress = None,
    offload: options.Offload = None,
    replicas: options.Replicas = 0,
    cpus_per_replica: options.CpusPerReplica = 1.0,
    gpus_per_replica: options.GpusPerReplica = 0.0,
    timeout: options.Timeout = 300.0,
    skip_bad_rows: options.SkipBadRows = False,
    trajectories: options.Trajectories = False,
    view: Annotated[
        bool,
        typer.Option("--view", help="Show the run in the browser while it plays.", rich_help_panel=OUTPUT),
    ] = False,
    export: Annotated[
        str | None,
        typer.Option(
            metavar="SERVICE",
            help="Send the run to wandb, mlflow or otel while it plays, as `gymsdk export` does afterwards.",
            show_default=False,
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    output: options.Output = None,
    resume: options.Resume = False,
    force: options.Force = False,
    overwrite: options.Overwrite = False,
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
    from gymsdk.rollouts.run import RunLimits
    from gymsdk.types import Budget

    row_options = {"--tasks": tasks, "--split": split, "--agent": agent, "NAME": names or None}
    has_model = model is not None or head is not None
    chosen = select_dataset(config, dataset, row_options, played=has_model) if config or dataset is not None else None
    environments = [chosen.environment] if chosen and head is None else list(names or [])
    if repeated := [name for name, count in Counter(environments).items() if count > 1]:
        raise UsageError(
            f"{repeated[0]} is named twice; name each environment once, and play tasks again with --repeats"
        )
    tasks = chosen.path if chosen else tasks
    if chosen and head is None:
        chosen.check_models()
    model_options = {
        "--model": model,
        "--base-url": options.join_base_urls(base_url),
        "--api": api,
        "--pin": ",".join(pin) or None,
        "--token-ids": "" if token_ids else None,
        "--token-interface": token_interface,
        "--tokenizer": tokenizer,
    }
    if trajectories and head is not None:
        raise UsageError(
            "--trajectories: servers do not report the model calls of a rollout; leave out --trajectories, or play here"
            " without --head"
        )
    _check_head_options(head, environments, model_options, tasks=tasks, settings=settings, agent=agent)
    sampled = options.parse_sampling(
        temperature=temperature, top_p=top_p, max_output_tokens=max_output_tokens, params=param
    )
    configured_model = chosen if chosen and chosen.player and head is None and model is None else None
    if configured_model:
        _check_model_options(model_options)
    environment_settings = options.parse_settings(environments, settings)
    model_fields = {
        "model": (model or "scripted/oracle") if head is None else None,
        "base_url": options.join_base_urls(base_url),
        "api": api,
        "pinned": options.parse_pins(pin),
        "tokens": token_ids,
        "token_interface": token_interface,
        "tokenizer": tokenizer,
    }
    plan = Plan(
        environments={
            name: {**(chosen.settings if chosen else {}), **each} for name, each in environment_settings.items()
        },
        head=head,
        tasks=tasks,
        agent=chosen.agent if chosen and head else agent,
        split=split,
        limit=limit,
        skip_bad_rows=skip_bad_rows,
        repeats=repeats or (chosen.repeats if chosen else 1),
        seed=seed,
        sampling=sampled,
        budget=Budget(turns=turns, tools=tool_calls, seconds=deadline),
        **(configured_model.describe_model() if configured_model else model_fields),
    )
    pace = RunLimits(concurrency=concurrency, attempts=attempts, timeout=timeout)
    policy = configured_model.build_model() if configured_model else None
    folder_options = {"resume": resume, "force": force, "overwrite": overwrite, "trajectories": trajectories}
    plays_default = head is None and model is None and configured_model is None
    ray_options = {
        "ray_address": ray_address,
        "offload": offload,
        "replicas": replicas,
        "cpus_per_replica": cpus_per_replica,
        "gpus_per_replica": gpus_per_replica,
    }
    _check_replicas(ray_options, head=head, configured=configured_model is not None, trajectories=trajectories)
    beside = Beside(view, export)
    _run_plan(
        plan, pace, output, policy, folder_options, ray_options, plays_default=plays_default, beside=beside, json=json
    )


def _check_model_options(model_options: dict[str, str | None]) -> None:
    """Raise `UsageError` if an option changes how the model of the configuration is called."""
    for option, value in model_options.items():
        if value is not None:
            raise UsageError(
                f"{f'{option} {value}'.rstrip()}: the configuration defines the model;"
                " change it there, or pass --model too"
            )


def _run_plan(  # noqa: PLR0913  # each is an option of the command
    plan: Plan,
    pace: RunLimits,
    output: Path | None,
    model: Model | None,
    folder_options: dict[str, bool],
    ray_options: dict[str, Any],
    *,
    plays_default: bool,
    beside: Beside,
    json: bool,
) -> None:
    from gymsdk.cli import ray
    from gymsdk.cli.progress import check_run, choose_folder, run_rollouts
    from gymsdk.rollouts.run import Run

    names = list(plan.environments) or [Path(plan.tasks or "").stem]
    address = ray.find_address(ray_options.pop("ray_address"))
    address = None if address == ray.NO_CLUSTER else address
    replicas = _build_replicas(plan, pace, ray_options) if ray_options["replicas"] else None
    with choose_folder(output, names, resume=folder_options["resume"]) as folder:
        run = Run(plan, folder, limits=pace, model=model, **folder_options)
        if address is not None:
            check_run(run, replicas, address)
        with ray.connect_ray(address, ray_options["offload"]), beside.prepare(folder) as start:
            metrics = run_rollouts(run, replicas, start)
            _print(folder, metrics, plays_default=plays_default, json=json)
    if any(each["failures"] or each["complaint"] for each in metrics):
        raise typer.Exit(1)


def _check_replicas(ray_options: dict[str, Any], *, head: str | None, configured: bool, trajectories: bool) -> None:
    """Raise `UsageError` if another option contradicts --replicas."""
    if not ray_options["replicas"]:
        return
    for option, is_set in {"--head": head is not None, "--config": configured, "--trajectories": trajectories}.items():
        if is_set:
            raise UsageError(f"--replicas and {option} cannot be combined; leave one of them out")
    from gymsdk.cli import ray

    if ray.find_address(ray_options["ray_address"]) in {None, ray.NO_CLUSTER}:
        count = ray_options["replicas"]
        raise UsageError(f"--replicas {count}: Ray places replicas; name a cluster with --ray-address")


def _build_replicas(plan: Plan, pace: RunLimits, ray_options: dict[str, Any]) -> Deployment:
    """Return the deployment whose replicas play *plan*."""
    from gymsdk.config.model import Deployment, ModelServerConfig

    assert plan.model is not None, "only the servers of a head have a model of their own"
    options = {
        "base_url": plan.base_url,
        "api": plan.api,
        "pinned": plan.pinned,
        "tokens": plan.tokens,
        "token_interface": plan.token_interface,
        "tokenizer": plan.tokenizer,
        "timeout": pace.timeout,
    }
    return Deployment(
        environments=plan.environments, model=ModelServerConfig(name=plan.model, options=options), **ray_options
    )


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
    from gymsdk.cli.progress import format_metrics_table, is_nonempty_file
    from gymsdk.rollouts.folder import FILES

    if json:
        for piece in _iter_json(folder):
            echo(piece, nl=False)
        return
    echo(format_metrics_table(metrics))
    if plays_default:
        echo("scripted/oracle, the environment's own solution, has played; evaluate a model with --model")
    for path in filter(is_nonempty_file, (folder / name for name in FILES)):
        echo(shorten_path(path))
    failed = sum(sum(each["failures"].values()) for each in metrics)
    retry_hint = f"the same command with --output {shorten_path(folder)} --resume plays them again"
    raised = sum(each["failures_raised"] for each in metrics)
    if raised:
        cause = f"{raised} of {failed} rollouts without a reward: the environment's own code raised an exception"
        typer.echo(f"{cause}; fix the lines that the table names, then {retry_hint}", err=True)
    retryable = sum(each["failures_retryable"] for each in metrics)
    if retryable > raised:
        typer.echo(
            f"{retryable - raised} of {failed} rollouts without a reward may succeed on a retry; {retry_hint}", err=True
        )
    if open_ := failed - retryable - sum(each["failures_for_good"] for each in metrics):
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
        while block := file.read(min(BLOCK_BYTES, remaining)):
            remaining -= len(block)
            yield block.replace(b"\n", b"\n  ")
    yield b"\n}\n"
