"""The page of commands says what `--help` does; run as a script, this writes it: `python tests/test_commands.py`."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import typer

from gymsdk.cli import app

PAGE = Path(__file__).resolve().parent.parent / "docs" / "commands.md"
WIDTH = 100
OPENING = """\
# Commands

What `--help` says of every command; `python tests/test_commands.py` writes this page. A setting that several of them
read is in [configuration](configuration.md).

Exit codes: 0 where all went well; 1 where something failed while it ran; 2 where what was asked for is wrong, before
anything has begun; 130 and 143 where Ctrl-C or SIGTERM ended it, but 0 for `gymsdk serve` once it has been ready.

A command ends by itself, whatever the code of an environment has left running. Tasks that have not ended 3 seconds
after their cancellation are named in a warning and left behind. The process waits at most 15 seconds for threads that
are no daemons, then names them and exits. The exit code stays the same.

That a head or a server is not there, refuses the token, or does not have what is asked for is a failure of whichever
command asks it: 1.
"""


def commands() -> Iterator[tuple[str, str]]:
    """Yield the words of each command, and its help."""
    yield from _commands(typer.main.get_command(app), "gymsdk", None)


def _commands(command: click.Command, words: str, above: click.Context | None) -> Iterator[tuple[str, str]]:
    here = click.Context(command, info_name=words.rsplit(maxsplit=1)[-1], parent=above, terminal_width=WIDTH)
    yield words, "\n".join(line.rstrip() for line in command.get_help(here).splitlines())
    for name, each in getattr(command, "commands", {}).items():
        yield from _commands(each, f"{words} {name}", here)


def page() -> str:
    """Give the page as it is to be."""
    return "\n".join([OPENING, *(f"## `{words}`\n\n```text\n{told}\n```\n" for words, told in commands())])


def _plain(text: str) -> str:
    return re.sub(r"[\s-]+", " ", text).strip()


@pytest.mark.parametrize(("words", "told"), [*commands()], ids=lambda each: each if "\n" not in each else "")
def test_the_page_says_what_the_help_of_a_command_does(words: str, told: str) -> None:
    found = re.search(rf"^## `{words}`\n\n```text\n(.*?)\n```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert found, "python tests/test_commands.py writes the page"
    # Where lines are broken depends on the versions of what breaks them.
    assert _plain(found[1]) == _plain(told), "python tests/test_commands.py writes the page"


def test_the_page_has_no_command_that_is_not_there() -> None:
    assert re.findall(r"^## `(.+)`$", PAGE.read_text(), re.MULTILINE) == [words for words, _ in commands()]


def test_a_process_says_the_same() -> None:
    found = subprocess.run(
        [sys.executable, "-m", "gymsdk", "serve", "--help"], capture_output=True, text=True, check=True
    )
    assert _plain(dict(commands())["gymsdk serve"]) == _plain(found.stdout)


if __name__ == "__main__":
    PAGE.write_text(page())
