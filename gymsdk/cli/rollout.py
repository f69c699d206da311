"""`gymsdk rollout`: play many episodes and write the graded rollouts to a folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from gymsdk.cli import options
from gymsdk.cli.tracebacks import Traceback
from gymsdk.errors import UsageError

if TYPE_CHECKING:
    from gymsdk.rollouts.plan import Plan
    from gymsdk.rollouts.run import Pace
    from gymsdk.types import Model, Row


def rollout(  # noqa: PLR0913  # each is an option of the command
    names: options.OptionalNames = None,
    *,
    head: options.Head = None,
    model: options.OptionalModelName = None,
    base_url: options.BaseUrl = [],  # noqa: B006  # typer copies it
    api: options.Api = None,
    pin: options.Pin = [],  # noqa: B006  # typer copies it
    token_ids: options.TokenIds = False,
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
    timeout: options.Timeout = 300.0,
    skip_bad_rows: options.SkipBadRows = False,
    trajectories: options.Trajectories = False,
    output: options.Output = None,
    resume: options.Resume = False,
    overwrite: options.Overwrite = False,
    traceback: Traceback = False,  # noqa: ARG001  # its callback does the work
    json: options.Json = False,
) -> None:
    """Play and grade many episodes.

    The command writes rollouts and metrics to a folder. With --head, running servers play the episodes.

    Examples:
        gymsdk rollout math --limit 20
        gymsdk rollout math --model vllm/Qwen/Qwen3-4B --base-url http://127.0.0.1:8000/v1
    """
    from gymsdk.cli.datasets import select_dataset
    from gymsdk.episode import Budget
    from gymsdk.rollouts.plan import Plan
    from gymsdk.rollouts.run import Pace

    others = {"--tasks": tasks, "--split": split, "--agent": agent, "NAME": names or None}
    elsewhere = model is not None or head is not None
    rows = select_dataset(config, dataset, others, played=elsewhere) if config or dataset is not None else None
    named = [rows.environment] if rows and head is None else list(dict.fromkeys(names or []))
    tasks = rows.path if rows else tasks
    if rows and head is None:
        rows.check_models()
    theirs = {
        "--model": model,
        "--base-url": options.join_base_urls(base_url),
        "--api": api,
        "--pin": ",".join(pin) or None,
        "--token-ids": "" if token_ids else None,
    }
    if trajectories and head is not None:
        raise UsageError(
            "--trajectories: servers do not report the model calls of a rollout; leave out --trajectories, or play here"
            " without --head"
        )
    _select_player(head, named, theirs, tasks=tasks, settings=settings, agent=agent)
    sampled = options.parse_sampling(
        temperature=temperature, top_p=top_p, max_output_tokens=max_output_tokens, params=param
    )
    its = rows if rows and rows.player and head is None and model is None else None
    if its:
        _check_model_options(theirs)
    given = options.parse_settings(named, settings)
    asked = {
        "model": (model or "scripted/oracle") if head is None else None,
        "base_url": options.join_base_urls(base_url),
        "api": api,
        "pinned": options.parse_pins(pin),
        "tokens": token_ids,
    }
    plan = Plan(
        environments={name: {**(rows.settings if rows else {}), **each} for name, each in given.items()},
        head=head,
        tasks=tasks,
        agent=rows.agent if rows and head else agent,
        split=split,
        limit=limit,
        skip_bad_rows=skip_bad_rows,
        repeats=repeats or (rows.repeats if rows else 1),
        seed=seed,
        sampling=sampled,
        budget=Budget(turns=turns, tools=tool_calls, seconds=deadline),
        **(its.describe_model() if its else asked),
    )
    pace = Pace(at_once=concurrency, attempts=attempts, timeout=timeout)
    player = its.build_model() if its else None
    how = {"resume": resume, "overwrite": overwrite, "trajectories": trajectories}
    _run_plan(plan, pace, output, player, how, json=json)


def _check_model_options(given: dict[str, str | None]) -> None:
    """Raise `UsageError` if an option changes how the model of the configuration is called."""
    for option, value in given.items():
        if value is not None:
            raise UsageError(
                f"{f'{option} {value}'.rstrip()}: the configuration defines the model;"
                " change it there, or pass --model too"
            )


def _run_plan(
    plan: Plan, pace: Pace, output: Path | None, model: Model | None, how: dict[str, bool], *, json: bool
) -> None:
    from gymsdk.cli.progress import choose_folder, run_rollouts
    from gymsdk.rollouts.run import Run

    folder = choose_folder(output, list(plan.environments) or [Path(plan.tasks or "").stem], resume=how["resume"])
    figures = run_rollouts(Run(plan, folder, pace=pace, model=model, **how))
    _print(folder, figures, json=json)
    if plan.tasks is None and plan.limit is not None:
        _warn_missing_tasks(figures, plan.limit)
    if any(each["failures"] or each["complaint"] for each in figures):
        raise typer.Exit(1)


def _select_player(
    head: str | None,
    names: list[str],
    given: dict[str, str | None],
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
        _require_names(names)
        return
    _check_remote_options(head, given)
    _select_rows(names, tasks, settings)


def _require_names(names: list[str]) -> None:
    if not names:
        raise UsageError("Missing argument 'NAME': name the environments to play; `gymsdk list` shows them")


def _check_remote_options(head: str, given: dict[str, str | None]) -> None:
    for option, value in given.items():
        if value is not None:
            servers = f"the servers at {head.rpartition('@')[2]}"
            raise UsageError(
                f"{f'{option} {value}'.rstrip()}: {servers} use the model they were started with;"
                f" leave out {option}, or play in this process without --head"
            )


def _select_rows(names: list[str], tasks: Path | None, settings: list[str]) -> None:
    if tasks is None and not names:
        raise UsageError("--head: name the environments to play, or pass a file of rows with --tasks")
    if tasks is not None and settings:
        raise UsageError(
            f"--set {settings[0]}: running servers have their settings already, and the rows come from {tasks};"
            " leave out --set, and pass it to `gymsdk serve`"
        )


def _print(folder: Path, figures: list[Row], *, json: bool) -> None:
    from gymsdk import jsonl
    from gymsdk.cli.progress import format_metrics_table
    from gymsdk.rollouts.folder import FILES

    if json:
        typer.echo(jsonl.dump_document({"output": str(folder), "environments": figures}), nl=False)
        return
    typer.echo(format_metrics_table(figures))
    for path in filter(_has_files, (folder / name for name in FILES)):
        typer.echo(path)
    lost = sum(sum(each["failures"].values()) for each in figures)
    again = f"the same command with --output {folder} --resume plays them again"
    raised = sum(each["failures_raised"] for each in figures)
    if raised:
        said = f"{raised} of {lost} rollouts without a reward: the environment's own code raised an exception"
        typer.echo(f"{said}; fix the lines that the table names, then {again}", err=True)
    retryable = sum(each["failures_retryable"] for each in figures)
    if retryable > raised:
        typer.echo(
            f"{retryable - raised} of {lost} rollouts without a reward may succeed on a retry; {again}", err=True
        )
    if open_ := lost - retryable - sum(each["failures_for_good"] for each in figures):
        typer.echo(
            f"{open_} of {lost} rollouts without a reward fail again until the cause is fixed; then {again}", err=True
        )


def _warn_missing_tasks(figures: list[Row], limit: int) -> None:
    """Print which environments had fewer tasks than --limit."""
    for each in figures:
        if each["tasks"] < limit:
            typer.echo(f"{each['environment']}: {each['tasks']} tasks, fewer than --limit {limit}", err=True)


def _has_files(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0
