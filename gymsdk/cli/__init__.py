"""The command line: one command, one file."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from gymsdk.cli import tracebacks
from gymsdk.cli.bench import bench
from gymsdk.cli.check import check
from gymsdk.cli.config import config
from gymsdk.cli.info import info
from gymsdk.cli.list import list_
from gymsdk.cli.new import new
from gymsdk.cli.options import CommandGroup
from gymsdk.cli.play import play
from gymsdk.cli.policy import app as policy
from gymsdk.cli.process_exit import limit_exit_time
from gymsdk.cli.profile import profile
from gymsdk.cli.restart import restart
from gymsdk.cli.reverify import reverify
from gymsdk.cli.rollout import rollout
from gymsdk.cli.serve import serve
from gymsdk.cli.status import status
from gymsdk.cli.tasks import tasks
from gymsdk.errors import GymsdkError, UsageError

app = typer.Typer(
    name="gymsdk",
    help="Play and grade LLM environments.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    add_completion=False,
    cls=CommandGroup,
)
app.command("list")(list_)
app.command()(info)
app.command()(tasks)
app.command()(new)
app.command()(play)
app.command()(rollout)
app.command()(reverify)
app.command()(profile)
app.command()(serve)
app.command()(status)
app.command()(restart)
app.command()(config)
app.add_typer(policy, name="policy")
app.command()(bench)
app.command()(check)


def _version(*, asked: bool) -> None:
    if asked:
        from gymsdk import __version__

        typer.echo(f"gymsdk {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Play and grade LLM environments."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line: exit code 2 for wrong input or usage, 1 for what failed while running.

    Without *arguments* it is this process's own command, which ends in time whatever threads its work has left.
    """
    try:
        app(arguments, prog_name="gymsdk")
    except GymsdkError as error:
        if tracebacks.is_enabled():
            tracebacks.print_cause(error)
        typer.echo(f"Error: {error}", err=True)
        code = 2 if isinstance(error, UsageError) else 1
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    if arguments is None:
        limit_exit_time(code)
    sys.exit(code)
