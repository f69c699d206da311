"""Commands and groups of commands: the layout of their help, their usage errors, and commands that load when called."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import typer
from typer import BadParameter
from typer.core import TyperCommand, TyperGroup

from gymsdk import console
from gymsdk.cli.output import reserve_stdout
from gymsdk.cli.process import Stopped
from gymsdk.errors import format_suggestion
from gymsdk.settings import PANELS
from gymsdk.working_folder import keep_working_folder, resolve_path

CHOICE_ERROR = re.compile(r"(?P<value>'[^']*') is not one of (?P<known>.*?)\.?", re.DOTALL)

START = (
    ("gymsdk list", "List the installed environments."),
    ("gymsdk play math", "Play one episode of an environment yourself."),
    ("gymsdk rollout math", "Play and grade many episodes with a model."),
)
"""The commands that the help of `gymsdk` shows first."""

MAX_UNGROUPED = 5
"""The largest number of options that the help of a command lists without panels."""


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

    def invoke(self, ctx: Any) -> Any:
        """Run the command; what its environments print goes to standard error."""
        console.raise_on_interrupt()
        with keep_working_folder(), reserve_stdout():
            # Now, because the code of an environment may change the working folder later.
            ctx.params = {name: _resolve_paths(value) for name, value in ctx.params.items()}
            try:
                return super().invoke(ctx)
            except Stopped as stop:
                raise typer.Exit(stop.code) from None

    def format_epilog(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002  # the signature of click
        """Write the examples."""
        if self.epilog:
            with formatter.section("Examples"):
                for line in self.epilog.splitlines():
                    formatter.write(f"{'':>{formatter.current_indent}}{line.strip()}\n")


@dataclass(frozen=True, slots=True)
class LazyCommand:
    """A command whose module is imported when the command is called.

    Attributes:
        target: The function of the command, or the `typer.Typer` of a group, as `module:name` in `gymsdk.cli`.
        panel: The panel of the command in the help of its group.
        summary: The first sentence of the command's help.
    """

    target: str
    panel: str
    summary: str

    def load(self, name: str) -> Any:
        """Import the command and return it under *name*."""
        module, _, attribute = self.target.partition(":")
        target = getattr(import_module(f"gymsdk.cli.{module}"), attribute)
        if isinstance(target, typer.Typer):
            target.info.name = name
            return typer.main.get_command(target)
        # A group gives its settings to its commands: alone, Typer would add `--install-completion` and boxes of rich.
        single = create_group()
        single.command(name, cls=Command)(target)
        return typer.main.get_command(single)


class _LazyCommands(dict[str, Any]):
    """The commands of a group by name; a lazy command is loaded when it is read."""

    def __getitem__(self, name: str) -> Any:
        # Loaded only now: with the modules of all commands, `gymsdk --help` takes 0.20 s of CPU instead of 0.11 s.
        command = super().__getitem__(name)
        if isinstance(command, LazyCommand):
            self[name] = command = command.load(name)
        return command

    def get(self, name: str, default: Any = None) -> Any:
        """Return the command *name*, or *default* if there is none."""
        return self[name] if name in self else default  # noqa: SIM401  # `self.get` is this function

    def values(self) -> Any:
        """Return all commands."""
        return [self[name] for name in self]

    def items(self) -> Any:
        """Return all commands with their names."""
        return [(name, self[name]) for name in self]


class CommandGroup(TyperGroup):
    """A group of commands that lists them by panel and suggests the nearest valid choice in error messages.

    Attributes:
        lazy: Commands of the group, by name, in addition to those that are registered with its `typer.Typer`.
    """

    lazy: Mapping[str, LazyCommand] = {}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.commands = _LazyCommands({**self.commands, **self.lazy})

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the commands to start with, each panel of commands, and the options."""
        if ctx.parent is None:
            with formatter.section("Start here"):
                formatter.write_dl(START)
        width = max(map(len, self.commands), default=0)
        panels: dict[str, list[tuple[str, str]]] = {}
        for name in self.commands:
            lazy = self.lazy.get(name)
            summary = lazy.summary if lazy else self.commands[name].get_short_help_str(formatter.width - width - 6)
            panels.setdefault(lazy.panel if lazy else "Commands", []).append((f"{name:<{width}}", summary))
        for panel, records in panels.items():
            with formatter.section(panel):
                formatter.write_dl(records)
        _write_panels(self.get_params(ctx), ctx, formatter)

    def invoke(self, ctx: Any) -> Any:
        """Run a command; its usage errors suggest the nearest valid choice."""
        try:
            return super().invoke(ctx)
        except BadParameter as error:
            error.message = rewrite_usage_error(error.message)
            raise


def create_group(cls: type[CommandGroup] = CommandGroup) -> typer.Typer:
    """Return a group for commands, with the layout of this module."""
    return typer.Typer(
        rich_markup_mode=None, pretty_exceptions_enable=False, no_args_is_help=True, add_completion=False, cls=cls
    )


def _resolve_paths(value: Any) -> Any:
    """Return the *value* of an option with relative paths made absolute."""
    if isinstance(value, Path):
        return resolve_path(value)
    return type(value)(map(_resolve_paths, value)) if isinstance(value, (list, tuple)) else value


def rewrite_usage_error(message: str) -> str:
    """Return *message* without pydantic's prefix, and with the nearest valid choice."""
    text = message.removeprefix("Value error, ")
    match = CHOICE_ERROR.fullmatch(text)
    if match is None:
        return text
    nearest = format_suggestion(match["value"].strip("'"), re.findall(r"'([^']*)'", match["known"]))
    return f"{match['value']} is not one of {match['known']}{nearest}" if nearest else text


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
        ordered = sorted(panels.items(), key=lambda item: PANELS.index(item[0]))
        sections = [("Arguments", arguments), *ordered, ("Other options", others)]
    for panel, records in sections:
        if records:
            with formatter.section(panel):
                formatter.write_dl(records)
