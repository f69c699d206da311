"""`gymsdk list`: list the installed environments."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Annotated

import typer

from gymsdk.cli import options
from gymsdk.cli.output import echo, print_json
from gymsdk.console import format_rows
from gymsdk.errors import BrokenPlugin, MissingExtra, UsageError
from gymsdk.plugins import registry


def list_(
    *,
    load: Annotated[bool, typer.Option("--load", help="Load each environment to find broken ones.")] = False,
    plugins: Annotated[
        bool, typer.Option("--plugins", help="List all plugins: environments, models, executors and others.")
    ] = False,
    json: options.Json = False,
) -> None:
    """List the installed environments.

    A broken environment is listed with its error. With --load, the exit code is 1 if an environment fails to load.

    Examples:
        gymsdk list
        gymsdk list --load --json
        gymsdk list --plugins --load
    """
    entries = registry.list_entries(None if plugins else registry.ENVIRONMENTS)
    listed = [replace(entry, error=entry.error or (_find_load_error(entry) if load else None)) for entry in entries]
    if json:
        _print_json(listed, has_groups=plugins)
    elif not listed:
        echo("No environment is installed. Install one, for example with `pip install gym-env-math`.")
    else:
        echo("\n".join(format_rows([_list_cells(entry, has_groups=plugins) for entry in listed])))
    if load and any(entry.error for entry in listed):
        raise typer.Exit(1)


def _find_load_error(entry: registry.Entry) -> str | None:
    try:
        if entry.group == registry.ENVIRONMENTS:
            registry.load(entry.name)
        else:
            registry.load_entry(entry)
    except (MissingExtra, UsageError):
        # The plugin works with what its user must choose: the packages of an extra, or a setting of the environment.
        return None
    except BrokenPlugin as error:
        return str(error)
    return None


def _list_cells(entry: registry.Entry, *, has_groups: bool) -> list[str]:
    text = f"broken: {entry.error}" if entry.error else entry.module if has_groups else entry.summary
    return [*([entry.group] if has_groups else []), entry.name, f"{entry.distribution} {entry.version}", text]


def _print_json(entries: list[registry.Entry], *, has_groups: bool) -> None:
    omitted = set() if has_groups else {"group"}
    listed = [{key: value for key, value in asdict(entry).items() if key not in omitted} for entry in entries]
    print_json(listed)
