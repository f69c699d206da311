"""Compare docs/commands.md with the output of `--help`; `python tests/test_commands.py` writes the page."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import typer
from packaging.version import Version

from gymsdk.cli import app

PAGE = Path(__file__).resolve().parent.parent / "docs" / "commands.md"
WIDTH = 100
OPENING = """\
# Commands

This page contains the `--help` text of every command, without lists of commands; `python tests/test_commands.py` writes
it.

Exit codes:

- 0: The command succeeded.
- 1: The command failed while it ran. This includes a head or a server that is not reachable, rejects the token, or does
  not have the requested resource.
- 2: The usage or the input is invalid, and the command started nothing.
- 130 and 143: Ctrl-C or SIGTERM stopped the command. `gymsdk serve` exits with 0 instead if it was ready before.

A command always exits, even if the code of an environment leaves tasks or threads running. If tasks do not end within 3
seconds after their cancellation, the command names them in a warning and abandons them. The command waits at most 15
seconds for threads that are not daemon threads, then names them and exits. The exit code does not change.
"""


def commands() -> Iterator[tuple[str, str]]:
    """Yield the command line of each command, and its help text."""
    yield from _commands(typer.main.get_command(app), "gymsdk", None)


def _commands(command: click.Command, name: str, parent: click.Context | None) -> Iterator[tuple[str, str]]:
    context = click.Context(command, info_name=name.rsplit(maxsplit=1)[-1], parent=parent, terminal_width=WIDTH)
    help_text = "\n".join(line.rstrip() for line in command.get_help(context).splitlines())
    # Every command has this option, mostly in its own section.
    help_text = re.sub(r"\n(?:\n(?:Other o|O)ptions:\n)? +--help +Show this message and exit\.", "", help_text)
    children = getattr(command, "commands", {})
    # The sections of the page are this list.
    entries = rf"\n\n[^\n]+:(\n  ({'|'.join(children)}) +[^\n]+)+(?=\n\n|$)"
    yield name, re.sub(entries, "", help_text) if children else help_text
    for child, entry in children.items():
        yield from _commands(entry, f"{name} {child}", context)


def page() -> str:
    """Return the text of the page."""
    return "\n".join([OPENING, *(f"## `{name}`\n\n```text\n{help_text}\n```\n" for name, help_text in commands())])


def _plain(text: str) -> str:
    return re.sub(r"[\s-]+", " ", text).strip()


@pytest.mark.skipif(Version(typer.__version__) < Version("0.29"), reason="older versions format the help differently")
@pytest.mark.parametrize(("name", "help_text"), [*commands()], ids=lambda text: text if "\n" not in text else "")
def test_the_page_contains_the_help_of_each_command(name: str, help_text: str) -> None:
    found = re.search(rf"^## `{name}`\n\n```text\n(.*?)\n```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert found, "run python tests/test_commands.py to update the page"
    # Line breaks depend on the versions of the libraries that format the help.
    assert _plain(found[1]) == _plain(help_text), "run python tests/test_commands.py to update the page"


def test_the_page_has_no_unknown_command() -> None:
    assert re.findall(r"^## `(.+)`$", PAGE.read_text(), re.MULTILINE) == [name for name, _ in commands()]


if __name__ == "__main__":
    PAGE.write_text(page())
