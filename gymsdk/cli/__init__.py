"""The command line. Each module defines one command."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Annotated

import typer

from gymsdk import console
from gymsdk.cli import output, process
from gymsdk.cli.group import CommandGroup, LazyCommand, create_group
from gymsdk.cli.output import echo
from gymsdk.cli.process import limit_exit_time
from gymsdk.errors import GymsdkError, UsageError
from gymsdk.settings import VARIABLES, list_unknown_variables
from gymsdk.working_folder import find_working_folder

ENVIRONMENTS, EPISODES, RUNS, SERVERS = "Environments", "Episodes", "Runs", "Servers"
"""The panels of commands in the help of `gymsdk`."""

COMMANDS = {
    "list": LazyCommand("list:list_", ENVIRONMENTS, "List the installed environments."),
    "info": LazyCommand("info:info", ENVIRONMENTS, "Describe an environment: splits, fields, settings and tools."),
    "tasks": LazyCommand("tasks:tasks", ENVIRONMENTS, "Write task rows for trainers, or check a file of rows."),
    "new": LazyCommand("new:new", ENVIRONMENTS, "Create an environment package from a template."),
    "check": LazyCommand("check:check", ENVIRONMENTS, "Find problems in an environment's tasks, verifier and package."),
    "play": LazyCommand("play:play", EPISODES, "Play one episode and show its verdict."),
    "rollout": LazyCommand("rollout:rollout", EPISODES, "Play and grade many episodes."),
    "reverify": LazyCommand("reverify:reverify", EPISODES, "Compute the rewards of stored rollouts again."),
    "profile": LazyCommand("profile:profile", EPISODES, "Estimate what training on an environment would learn."),
    "view": LazyCommand("view:view", RUNS, "Show runs in the browser: transcripts, tables, comparisons."),
    "show": LazyCommand("show:show", RUNS, "Print a stored run with its lowest rewards, or one transcript."),
    "compare": LazyCommand("compare:compare", RUNS, "Compare two runs on the tasks that both have."),
    "replay": LazyCommand("replay:replay", RUNS, "Play stored rollouts again, or continue one differently."),
    "export": LazyCommand("export:export", RUNS, "Write training files from runs, or send runs to a service."),
    "serve": LazyCommand("serve:serve", SERVERS, "Serve environments over HTTP until Ctrl-C."),
    "status": LazyCommand("status:status", SERVERS, "Show the health of the servers of a head."),
    "restart": LazyCommand("restart:restart", SERVERS, "Restart a supervised server after its sessions have ended."),
    "config": LazyCommand("config:config", SERVERS, "Show settings with their origins, or write a configuration."),
    "bench": LazyCommand("bench:bench", SERVERS, "Measure throughput and latency of served environments."),
    "policy": LazyCommand("policy:app", SERVERS, "Serve a scripted policy as an OpenAI-compatible endpoint."),
    "tokens": LazyCommand("tokens:app", EPISODES, "Check the token ids of conversations before training."),
    "trainer": LazyCommand("trainer:app", SERVERS, "Check the integration of a trainer."),
}
"""The commands by name."""


class RootGroup(CommandGroup):
    """The group of all commands."""

    lazy = COMMANDS


app = create_group(RootGroup)


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


def _warn_of_unknown_variables() -> None:
    # The commands that another command starts have the same variables.
    if not {"--fd", "--with-parent"} & set(sys.argv):
        for name in list_unknown_variables(os.environ):
            # All names begin alike, which must not make any two of them similar.
            nearest = get_close_matches(name, VARIABLES, n=1, cutoff=0.85)
            hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
            typer.echo(f"{name} is not a variable of gymsdk and is ignored{hint}", err=True)


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
        _warn_of_unknown_variables()
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
        # For a file, or for standard output, the system has no room.
        if error.errno not in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
            raise
        place = "" if error.filename is None else f" {error.filename}"
        typer.echo(f"Error: cannot write{place}: {error.strerror}", err=True)
        code = 1
    except SystemExit as stopped:
        code = stopped.code if isinstance(stopped.code, int) else int(stopped.code is not None)
    if arguments is None:
        limit_exit_time(code)
    sys.exit(code)
