"""A run from the command line: followed on standard error, stopped by a signal, gone on with later."""

from __future__ import annotations

import logging
import re
import shlex
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

import typer

from gymsdk.cli.progress import Progress
from gymsdk.cli.stopping import Stopped, until_stopped
from gymsdk.errors import UsageError
from gymsdk.rollouts.origin import program
from gymsdk.rollouts.run import Run, carry_out
from gymsdk.types import Row

ALIKE = 5
"""How many warnings of one form about one thing are shown."""

MOST = 50
"""How many of one form are shown, whatever they are about."""


def carried_out(run: Run) -> list[Row]:
    """Play *run* and give its figures; a signal leaves the folder resumable and says how."""
    folder = run.output
    with Progress() as watch, warnings():
        words = f"stopped; what has finished is in {folder}; go on with:\n  {again(sys.argv[1:], folder)}"
        try:
            # What an author's code prints must not mix with the figures, which may be JSON for a program.
            with redirect_stdout(sys.stderr):
                return until_stopped(carry_out(run, watch), last_words=f"{words}\n")
        except Stopped as stop:
            code = stop.code
    if folder.exists():
        typer.echo(words, err=True)
    raise typer.Exit(code)


def again(words: Sequence[str], folder: Path) -> str:
    """Give the command that goes on with the run that the same program began in *folder* with *words*."""
    kept = [word for word in words if word not in {"--overwrite", "--resume"}]
    named = any(word.startswith("--output") or re.match("-o", word) for word in kept)
    there = [] if named else ["--output", str(folder)]
    return shlex.join([*program(), *kept, *there, "--resume"])


def folder_of(output: Path | None, names: Sequence[str], *, resume: bool) -> Path:
    """Give the folder to write: the one named, or a new one; raises `UsageError` where there is none to resume."""
    if output is None and resume:
        raise UsageError("--resume goes on with the run in a folder; name the folder with --output")
    return output or dated(names)


def dated(names: Sequence[str]) -> Path:
    """Give a folder that is not there yet, for a run that names none."""
    first = Path("rollouts") / f"{'-'.join(names)}-{time.strftime('%Y%m%d-%H%M%S')}"
    number, path = 1, first
    while path.exists():
        number += 1
        path = first.with_name(f"{first.name}-{number}")
    return path


@contextmanager
def warnings() -> Iterator[None]:
    """Show gymsdk's warnings on standard error, at most `ALIKE` alike: a run may have a million episodes."""
    handler, log = _Few(), logging.getLogger("gymsdk")
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


class _Few(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._shown: Counter[str] = Counter()
        self._alike: Counter[tuple[str, str]] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        form, about = str(record.msg), str(record.args[0]) if isinstance(record.args, tuple) and record.args else ""
        if self._shown[form] >= MOST or self._alike[form, about] >= ALIKE:
            return
        self._alike[form, about] += 1
        self._shown[form] += 1
        typer.echo(self.format(record), err=True)
        if self._alike[form, about] == ALIKE or self._shown[form] == MOST:
            typer.echo("(further warnings like this one are not shown)", err=True)
