"""`gymsdk list`: list the installed environments."""

from __future__ import annotations

from typing import Annotated

import typer

from gymsdk.cli import options
from gymsdk.cli.output import echo
from gymsdk.errors import BrokenEnvironment, UsageError
from gymsdk.plugins import registry


def list_(
    *,
    load: Annotated[bool, typer.Option("--load", help="Load each environment to find broken ones.")] = False,
    json: options.Json = False,
) -> None:
    """List the installed environments.

    A broken environment is listed with its error. With --load, the exit code is 1 if an environment fails to load.

    Examples:
        gymsdk list
        gymsdk list --load --json
    """
    entries = list(registry.installed().values())
    errors = {entry.name: entry.error or (_find_load_error(entry.name) if load else None) for entry in entries}
    broken = load and any(errors.values())
    if json:
        _print_json(entries, errors)
    elif not entries:
        echo("No environment is installed. Install one, for example with `pip install gym-env-math`.")
    else:
        _print_table(entries, errors)
    if broken:
        raise typer.Exit(1)


def _find_load_error(name: str) -> str | None:
    try:
        registry.load(name)
    except BrokenEnvironment as error:
        return str(error)
    except UsageError:
        # The environment loads; it only lacks a setting that its user must choose.
        return None
    return None


def _print_table(entries: list[registry.Entry], errors: dict[str, str | None]) -> None:
    homes = {entry.name: f"{entry.distribution} {entry.version}" for entry in entries}
    wide, wider = max(map(len, homes)), max(map(len, homes.values()))
    for entry in entries:
        error = errors[entry.name]
        text = f"broken: {error}" if error else entry.summary
        echo(f"{entry.name:<{wide}}  {homes[entry.name]:<{wider}}  {text}".rstrip())


def _print_json(entries: list[registry.Entry], errors: dict[str, str | None]) -> None:
    from dataclasses import asdict

    from gymsdk import jsonl

    listed = [asdict(entry) | {"error": errors[entry.name]} for entry in entries]
    echo(jsonl.dump_document(listed), nl=False)
