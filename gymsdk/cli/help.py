"""Lay out the help of commands and improve the error messages of the argument parser."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from typer import BadParameter
from typer.core import TyperCommand, TyperGroup

from gymsdk.errors import format_suggestion

CHOICE_ERROR = re.compile(r"(?P<given>'[^']*') is not one of (?P<known>.*?)\.?", re.DOTALL)

START = (
    ("gymsdk list", "List the installed environments."),
    ("gymsdk play math", "Play one episode of an environment yourself."),
    ("gymsdk rollout math", "Play and grade many episodes with a model."),
)
"""The commands that the help of `gymsdk` shows first."""

MAX_UNGROUPED = 5
"""A command with at most this many options lists them without panels."""


class Command(TyperCommand):
    """A command whose help groups the options by panel and ends with the examples of its docstring.

    The layout is plain text. Typer's own panels need `rich`, which adds to the start-up time and reads square
    brackets as markup.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        text, _, examples = (self.help or "").partition("Examples:\n")
        self.help, self.epilog = text.strip(), examples

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments and each panel of options."""
        _write_panels(self.get_params(ctx), ctx, formatter)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002  # the protocol
        """Write the examples."""
        if self.epilog:
            with formatter.section("Examples"):
                for line in self.epilog.splitlines():
                    formatter.write(f"{'':>{formatter.current_indent}}{line.strip()}\n")


class CommandGroup(TyperGroup):
    """A group of commands that lists them by panel and suggests the nearest valid choice in error messages."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the commands to start with, each panel of commands, and the options."""
        if ctx.parent is None:
            with formatter.section("Start here"):
                formatter.write_dl(START)
        panels: dict[str, list[Any]] = {}
        for name in self.list_commands(ctx):
            command: Any = self.get_command(ctx, name)
            panels.setdefault(getattr(command, "rich_help_panel", None) or "Commands", []).append(command)
        width = max((len(command.name) for commands in panels.values() for command in commands), default=0)
        for panel, commands in panels.items():
            with formatter.section(panel):
                limit = formatter.width - width - 6
                formatter.write_dl([(f"{each.name:<{width}}", each.get_short_help_str(limit)) for each in commands])
        _write_panels(self.get_params(ctx), ctx, formatter)

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except BadParameter as error:
            error.message = rewrite_usage_error(error.message)
            raise


def rewrite_usage_error(message: str) -> str:
    """Return *message* without pydantic's prefix, and with the nearest valid choice."""
    text = message.removeprefix("Value error, ")
    match = CHOICE_ERROR.fullmatch(text)
    if match is None:
        return text
    nearest = format_suggestion(match["given"].strip("'"), re.findall(r"'([^']*)'", match["known"]))
    return f"{match['given']} is not one of {match['known']}{nearest}" if nearest else text


def _write_panels(parameters: Iterable[Any], ctx: Any, formatter: Any) -> None:
    """Write the arguments, then the options by panel, or all in one list if there are few of them."""
    arguments: list[tuple[str, str]] = []
    panels: dict[str, list[tuple[str, str]]] = {}
    others: list[tuple[str, str]] = []
    for parameter in parameters:
        record = parameter.get_help_record(ctx)
        if record is None:
            continue
        if parameter.param_type_name == "argument":
            arguments.append(record)
        elif panel := getattr(parameter, "rich_help_panel", None):
            panels.setdefault(panel, []).append(record)
        else:
            others.append(record)
    options = [record for records in panels.values() for record in records] + others
    if len(options) <= MAX_UNGROUPED:
        sections = [("Arguments", arguments), ("Options", options)]
    else:
        sections = [("Arguments", arguments), *panels.items(), ("Other options", others)]
    for panel, records in sections:
        if records:
            with formatter.section(panel):
                formatter.write_dl(records)
