"""`gymsdk rollout`: play many episodes and put graded rollouts on disk."""

from __future__ import annotations

import logging
import re
import shlex
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from gymsdk.cli import options
from gymsdk.cli.progress import Progress
from gymsdk.cli.stopping import Stopped, run_until_signal
from gymsdk.cli.tracebacks import Traceback
from gymsdk.errors import UsageError
from gymsdk.rollouts.plan import program
from gymsdk.rollouts.run import Run, carry_out
from gymsdk.types import Row

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

    Rollouts and figures go to a folder. With --head, running servers play.
    """
    from gymsdk.cli.options import select_dataset
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
    """Refuse to change how the configuration's model is asked."""
    for option, value in given.items():
        if value is not None:
            raise UsageError(
                f"{f'{option} {value}'.rstrip()}: the configuration says who plays; write it there, or name --model too"
            )


def _run_plan(
    plan: Plan, pace: Pace, output: Path | None, model: Model | None, how: dict[str, bool], *, json: bool
) -> None:
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
    """Refuse what does not go together with who plays: this process, or the servers of *head*."""
    if agent is not None and (head is None or tasks is None):
        raise UsageError(
            f"--agent {agent} plays rows of a file at servers; give --head and --tasks too, or leave it out"
        )
    if head is None:
        _require_names(names)
        return
    _check_remote_options(head, given)
    _select_rows(names, tasks, settings)


def _require_names(names: list[str]) -> None:
    if not names:
        raise UsageError("Missing argument 'NAME': say which environments are played; `gymsdk list` names them")


def _check_remote_options(head: str, given: dict[str, str | None]) -> None:
    for option, value in given.items():
        if value is not None:
            servers = f"the servers at {head.rpartition('@')[2]}"
            raise UsageError(
                f"{f'{option} {value}'.rstrip()}: {servers} play with the model they were started with;"
                f" leave out {option}, or play here without --head"
            )


def _select_rows(names: list[str], tasks: Path | None, settings: list[str]) -> None:
    if tasks is None and not names:
        raise UsageError("--head: name the environments whose tasks are to be played, or a file of rows with --tasks")
    if tasks is not None and settings:
        raise UsageError(
            f"--set {settings[0]}: the servers have their settings, and the rows are those of {tasks};"
            " leave out --set, and give it to `gymsdk serve`"
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
    again = f"the same command with --output {folder} --resume tries them again"
    raised = sum(each["failures_raised"] for each in figures)
    if raised:
        said = f"{raised} of {lost} without a reward: the environment's own code raised an exception"
        typer.echo(f"{said}; correct the lines that the table names, then {again}", err=True)
    retryable = sum(each["failures_retryable"] for each in figures)
    if retryable > raised:
        typer.echo(f"{retryable - raised} of {lost} without a reward may go well another time; {again}", err=True)
    if open_ := lost - retryable - sum(each["failures_for_good"] for each in figures):
        typer.echo(f"{open_} of {lost} without a reward fail again unless that is mended; then {again}", err=True)


def _warn_missing_tasks(figures: list[Row], limit: int) -> None:
    """Repeat at the end which environments had fewer tasks than were asked for."""
    for each in figures:
        if each["tasks"] < limit:
            typer.echo(f"{each['environment']}: {each['tasks']} tasks, of --limit {limit}", err=True)


def _has_files(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


MAX_SIMILAR_WARNINGS = 5
"""How many warnings of one form about one thing are shown."""

MAX_WARNING_KINDS = 50
"""How many of one form are shown, whatever they are about."""


def run_rollouts(run: Run) -> list[Row]:
    """Play *run* and give its figures; a signal leaves the folder resumable and says how."""
    folder = run.output
    with Progress() as watch, show_warnings():
        words = (
            f"stopped; what has finished is in {folder}; go on with:\n  {format_resume_command(sys.argv[1:], folder)}"
        )
        try:
            # What an author's code prints must not mix with the figures, which may be JSON for a program.
            with redirect_stdout(sys.stderr):
                return run_until_signal(carry_out(run, watch), last_words=f"{words}\n")
        except Stopped as stop:
            code = stop.code
    if folder.exists():
        typer.echo(words, err=True)
    raise typer.Exit(code)


def format_resume_command(words: Sequence[str], folder: Path) -> str:
    """Give the command that goes on with the run that the same program began in *folder* with *words*."""
    kept = [word for word in words if word not in {"--overwrite", "--resume"}]
    named = any(word.startswith("--output") or re.match("-o", word) for word in kept)
    there = [] if named else ["--output", str(folder)]
    return shlex.join([*program(), *kept, *there, "--resume"])


def choose_folder(output: Path | None, names: Sequence[str], *, resume: bool) -> Path:
    """Give the folder to write: the one named, or a new one; raises `UsageError` where there is none to resume."""
    if output is None and resume:
        raise UsageError("--resume goes on with the run in a folder; name the folder with --output")
    return output or name_dated_folder(names)


def name_dated_folder(names: Sequence[str]) -> Path:
    """Give a folder that is not there yet, for a run that names none."""
    first = Path("rollouts") / f"{'-'.join(names)}-{time.strftime('%Y%m%d-%H%M%S')}"
    number, path = 1, first
    while path.exists():
        number += 1
        path = first.with_name(f"{first.name}-{number}")
    return path


@contextmanager
def show_warnings() -> Iterator[None]:
    """Show gymsdk's warnings on standard error, at most `ALIKE` alike: a run may have a million episodes."""
    handler, log = _WarningHandler(), logging.getLogger("gymsdk")
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


class _WarningHandler(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._shown: Counter[str] = Counter()
        self._alike: Counter[tuple[str, str]] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        form, about = str(record.msg), str(record.args[0]) if isinstance(record.args, tuple) and record.args else ""
        if self._shown[form] >= MAX_WARNING_KINDS or self._alike[form, about] >= MAX_SIMILAR_WARNINGS:
            return
        self._alike[form, about] += 1
        self._shown[form] += 1
        typer.echo(self.format(record), err=True)
        if self._alike[form, about] == MAX_SIMILAR_WARNINGS or self._shown[form] == MAX_WARNING_KINDS:
            typer.echo("(further warnings like this one are not shown)", err=True)
