"""The command line. Each module defines one command."""

from __future__ import annotations

import errno
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from gymsdk import console
from gymsdk.cli import output, process
from gymsdk.cli.bench import bench
from gymsdk.cli.check import check
from gymsdk.cli.compare import compare
from gymsdk.cli.config import config
from gymsdk.cli.export import export
from gymsdk.cli.info import info
from gymsdk.cli.list import list_
from gymsdk.cli.new import new
from gymsdk.cli.options import Command, CommandGroup
from gymsdk.cli.output import echo
from gymsdk.cli.play import play
from gymsdk.cli.policy import app as policy
from gymsdk.cli.process import limit_exit_time
from gymsdk.cli.profile import profile
from gymsdk.cli.replay import replay
from gymsdk.cli.restart import restart
from gymsdk.cli.reverify import reverify
from gymsdk.cli.rollout import rollout
from gymsdk.cli.serve import serve
from gymsdk.cli.show import show
from gymsdk.cli.status import status
from gymsdk.cli.tasks import tasks
from gymsdk.cli.tokens import app as tokens
from gymsdk.cli.trainer import app as trainer
from gymsdk.cli.view import view
from gymsdk.errors import GymsdkError, UsageError
from gymsdk.working_folder import find_working_folder

ENVIRONMENTS, EPISODES, RUNS, SERVERS = "Environments", "Episodes", "Runs", "Servers"
"""The panels of commands in the help of `gymsdk`."""

app = typer.Typer(
    name="gymsdk",
    help="Play, grade and serve LLM environments.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    add_completion=False,
    cls=CommandGroup,
)
app.command("list", cls=Command, rich_help_panel=ENVIRONMENTS)(list_)
app.command(cls=Command, rich_help_panel=ENVIRONMENTS)(info)
app.command(cls=Command, rich_help_panel=ENVIRONMENTS)(tasks)
app.command(cls=Command, rich_help_panel=ENVIRONMENTS)(new)
app.command(cls=Command, rich_help_panel=ENVIRONMENTS)(check)
app.command(cls=Command, rich_help_panel=EPISODES)(play)
app.command(cls=Command, rich_help_panel=EPISODES)(rollout)
app.command(cls=Command, rich_help_panel=EPISODES)(reverify)
app.command(cls=Command, rich_help_panel=EPISODES)(profile)
app.command(cls=Command, rich_help_panel=RUNS)(view)
app.command(cls=Command, rich_help_panel=RUNS)(show)
app.command(cls=Command, rich_help_panel=RUNS)(compare)
app.command(cls=Command, rich_help_panel=RUNS)(replay)
app.command(cls=Command, rich_help_panel=RUNS)(export)
app.command(cls=Command, rich_help_panel=SERVERS)(serve)
app.command(cls=Command, rich_help_panel=SERVERS)(status)
app.command(cls=Command, rich_help_panel=SERVERS)(restart)
app.command(cls=Command, rich_help_panel=SERVERS)(config)
app.command(cls=Command, rich_help_panel=SERVERS)(bench)
app.add_typer(policy, name="policy", rich_help_panel=SERVERS)
app.add_typer(tokens, name="tokens", rich_help_panel=EPISODES)
app.add_typer(trainer, name="trainer", rich_help_panel=SERVERS)


DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""The errors of a file, or of standard output, for which the system has no room."""


def _print_version(*, asked: bool) -> None:
    if asked:
        from gymsdk import __version__

        echo(f"gymsdk {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Play, grade and serve LLM environments."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit the process.

    The exit code is 2 for wrong input or usage, and 1 for a failure while the command runs.

    Args:
        arguments: The arguments of the command. Without them, the process's own arguments are used, and the process
            exits within a time limit even if an environment's threads are still running.
    """
    if arguments is None:
        console.exit_on_interrupt()
        console.open_standard_files()
        console.replace_unencodable_characters()
        output.reserve_until_exit()
    try:
        app(arguments, prog_name="gymsdk")
    except GymsdkError as error:
        if process.is_enabled():
            process.print_cause(error)
        typer.echo(f"Error: {error}", err=True)
        code = 2 if isinstance(error, UsageError) else 1
    except FileNotFoundError:
        # A library may ask for the working folder, too.
        if find_working_folder() is not None:
            raise
        typer.echo("Error: the working folder has been removed; change to another folder, as with: cd ~", err=True)
        code = 2
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        place = "" if error.filename is None else f" {error.filename}"
        typer.echo(f"Error: cannot write{place}: {error.strerror}", err=True)
        code = 1
    except SystemExit as stopped:
        code = stopped.code if isinstance(stopped.code, int) else int(stopped.code is not None)
    if arguments is None:
        limit_exit_time(code)
    sys.exit(code)
