"""`gymsdk tasks`: write an environment's rows to a file for trainers, or check such a file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gymsdk.cli import options
from gymsdk.errors import BrokenEnvironment, GymsdkError, UnknownEnvironment, UsageError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from gymsdk.environment import Environment
    from gymsdk.rollouts.tasks import FileCheck
    from gymsdk.types import Row

MAX_ERRORS_SHOWN = 100
"""How many rows of each environment are written if --limit is not given. A split may be infinite."""


def tasks(  # noqa: PLR0913  # each is an option of the command
    names: options.OptionalNames = None,
    *,
    split: options.Split = None,
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit",
            "-n",
            min=1,
            metavar="N",
            help="Write N rows of each environment. By default, 100.",
            rich_help_panel=options.TASKS,
        ),
    ] = None,
    seed: options.Seed = 0,
    settings: options.Settings = [],  # noqa: B006  # typer copies it
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Write to this file instead of standard output.",
            rich_help_panel=options.OUTPUT,
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the file.", rich_help_panel=options.OUTPUT)
    ] = False,
    validate: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Check the rows of this file instead of writing rows.", rich_help_panel=options.TASKS
        ),
    ] = None,
    config: options.Configs = [],  # noqa: B006  # typer copies it
    dataset: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Check the rows of this dataset of the configuration.", rich_help_panel=options.TASKS
        ),
    ] = None,
    json: options.Json = False,
) -> None:
    """Write task rows for trainers, or check a file of rows.

    Each row names the agent of its environment. The rows of several environments alternate.

    Examples:
        gymsdk tasks math --split train --limit 1000 --output math.jsonl
        gymsdk tasks --validate math.jsonl
    """
    environments = list(dict.fromkeys(names or []))
    if dataset is not None or config:
        _check_dataset(config, dataset, {"NAME": names or None, "--validate": validate, "--output": output}, json=json)
        return
    if validate is not None:
        _validate_file(validate, environments, settings, json=json)
        return
    if not environments:
        raise UsageError("Missing argument 'NAME': name the environments to write rows of; `gymsdk list` shows them")
    _write_rows(environments, settings, split, seed=seed, limit=limit, output=output, overwrite=overwrite, json=json)


def _write_rows(  # the command's options
    names: list[str],
    settings: list[str],
    split: str | None,
    *,
    seed: int,
    limit: int | None,
    output: Path | None,
    overwrite: bool,
    json: bool,
) -> None:
    from contextlib import redirect_stdout

    from gymsdk import jsonl
    from gymsdk.cli.stopping import run_in_new_loop
    from gymsdk.plugins import registry
    from gymsdk.rollouts.tasks import AtomicRowWriter, add_tools, interleave_splits

    parsed = options.parse_settings(names, settings)
    # The output of an environment's code must not mix with the rows.
    out, silent = sys.stdout.buffer, redirect_stdout(sys.stderr)
    with silent:
        loaded = {name: registry.load(name, **each) for name, each in parsed.items()}
        rows_to_write = add_tools(
            loaded, interleave_splits(loaded, split, seed=seed, limit=limit or MAX_ERRORS_SHOWN), seed=seed
        )
        if limit is None:
            typer.echo(f"at most {MAX_ERRORS_SHOWN} rows of each environment; pass another number with -n N", err=True)
        if output is None:
            run_in_new_loop(_iter_rows(rows_to_write, lambda row: out.write(jsonl.dump_row(row))))
            out.flush()
            return
        with AtomicRowWriter(output, overwrite=overwrite) as sheet:
            run_in_new_loop(_iter_rows(rows_to_write, sheet.add))
    summary = {"output": str(output), "rows": sheet.count, "environments": names}
    typer.echo(jsonl.dump_document(summary) if json else f"{sheet.count:,} rows in {output}\n", nl=False)


async def _iter_rows(rows: AsyncIterator[Row], write: Callable[[Row], object]) -> None:
    async for row in rows:
        write(row)


def _validate_file(path: Path, names: list[str], settings: list[str], *, json: bool) -> None:
    from functools import cache

    from gymsdk.plugins import registry
    from gymsdk.rollouts.tasks import check_file

    parsed = options.parse_settings(names, settings) if names or not settings else _parse_unprefixed_settings(settings)

    @cache
    def environment_of(name: str) -> Environment | GymsdkError:
        try:
            return registry.load(name, **parsed.get(name, {}))
        except (UnknownEnvironment, BrokenEnvironment) as error:
            return error

    report = check_file(path, environment_of, only=names[0] if len(names) == 1 else None)
    _print_errors(path, report, json=json)
    if report.bad:
        raise typer.Exit(1)


def _check_dataset(files: list[Path], name: str | None, others: dict[str, object], *, json: bool) -> None:
    from gymsdk.cli.datasets import select_dataset
    from gymsdk.plugins import registry
    from gymsdk.rollouts.tasks import check_file

    chosen = select_dataset(files, name, others, played=True)
    environment = registry.load(chosen.environment, **chosen.settings)
    report = check_file(chosen.path, lambda _: environment, only=chosen.environment)
    _print_errors(chosen.path, report, json=json)
    if report.bad:
        raise typer.Exit(1)


def _parse_unprefixed_settings(settings: list[str]) -> dict[str, dict[str, object]]:
    raise UsageError(f"--set {settings[0]}: name the environment of the setting, as in `gymsdk tasks NAME --set …`")


def _print_errors(path: Path, report: FileCheck, *, json: bool) -> None:
    from gymsdk import jsonl

    if json:
        bad = [{"line": number, "reason": reason} for number, reason in report.bad]
        document = {"file": str(path), "good": report.good.total(), "bad": bad, "environments": dict(report.good)}
        typer.echo(jsonl.dump_document(document), nl=False)
        return
    for number, reason in report.bad:
        typer.echo(f"{path}:{number}: {reason}")
    by_name = "".join(f", {count:,} of {name}" for name, count in report.good.items())
    typer.echo(f"{report.good.total():,} rows are valid{by_name}; {len(report.bad):,} are not")
