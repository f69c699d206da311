"""The command line: one command, one file."""

from __future__ import annotations

import sys

import typer

from gymsdk.cli.info import info
from gymsdk.cli.list import list_
from gymsdk.cli.play import play
from gymsdk.cli.profile import profile
from gymsdk.cli.rollout import rollout
from gymsdk.errors import GymsdkError, UsageError

app = typer.Typer(
    name="gymsdk",
    help="Play, grade and serve LLM environments.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    add_completion=False,
)
app.command("list")(list_)
app.command()(info)
app.command()(play)
app.command()(rollout)
app.command()(profile)


def main() -> None:
    """Run the command line: exit code 2 for wrong input or usage, 1 for what failed while running."""
    try:
        app()
    except GymsdkError as error:
        print(f"Error: {error}", file=sys.stderr)  # noqa: T201  # the command line's own voice
        sys.exit(2 if isinstance(error, UsageError) else 1)
