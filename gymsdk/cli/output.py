"""Reserve standard output for the results of a command, which may be JSON for a program.

The code of an environment, its libraries and its child processes may write to `sys.stdout` or to descriptor 1. While a
command runs, both lead to standard error.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

import typer

STDOUT, STDERR = 1, 2
"""The descriptors of the standard streams."""

STATUS_COLORS = {"passed": "green", "failed": "red", "skipped": "yellow"}
"""The colors of the results of checks."""

_reserved: list[TextIO] = []
"""The stream for the results of the running command."""

_saved: list[int] = []
"""The descriptor of that stream, if this module has opened it."""

_until_exit = False


def _drop_in_child() -> None:
    # A forked copy would print the buffer of the stream, and would keep the reader of a pipe waiting.
    for descriptor in _saved:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, descriptor, inheritable=False)
        os.close(null)


os.register_at_fork(after_in_child=_drop_in_child)


def reserve_until_exit() -> None:
    """Let the next reservation last until the process ends, because threads and exit handlers may write then."""
    global _until_exit  # noqa: PLW0603 - a property of the process
    _until_exit = True


def get_output() -> TextIO:
    """Return the stream for the results of the command."""
    return _reserved[-1] if _reserved else sys.stdout


def echo(message: object = "", *, nl: bool = True, err: bool = False) -> None:
    """Print *message* as a result of the command, or to standard error if *err* is set.

    JSON is passed as bytes: it is UTF-8 whatever the encoding of the console.
    """
    typer.echo(message, file=None if err else get_output(), nl=nl, err=err)


def secho(message: object = "", *, nl: bool = True, err: bool = False, **style: Any) -> None:
    """Print *message* as `echo` does, in a *style* of `typer.style`."""
    typer.secho(message, file=None if err else get_output(), nl=nl, err=err, **style)


def print_json(content: object) -> None:
    """Print *content* as a JSON document, which is the result of the command."""
    from gymsdk import jsonl

    echo(jsonl.dump_document(content), nl=False)


@contextmanager
def reserve_stdout() -> Iterator[None]:
    """Let only `get_output` and `echo` write to standard output inside the block; an inner block changes nothing."""
    if _reserved:
        yield
        return
    stdout: TextIO | None = sys.stdout
    output, saved = _open_output(stdout)
    _reserved.append(output)
    _saved.extend([] if saved is None else [saved])
    sys.stdout = sys.stderr
    try:
        yield
    except BaseException:
        # The reader may have closed the pipe; the error of the command says so.
        with suppress(OSError):
            _release(stdout, output, saved)
        raise
    _release(stdout, output, saved)


def _open_output(stdout: TextIO | None) -> tuple[TextIO, int | None]:
    """Return a stream to the file behind *stdout*, and its descriptor if descriptor 1 now leads to standard error."""
    if stdout is None:
        # Python found descriptor 1 closed.
        return open(os.devnull, "w"), None  # noqa: PTH123 - open as long as the command runs
    if not _is_descriptor(stdout, STDOUT):
        # A test or another program has replaced `sys.stdout`.
        return stdout, None
    stdout.flush()
    saved = os.dup(STDOUT)
    try:
        os.dup2(STDERR, STDOUT)
    except OSError:
        # Standard error is closed.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, STDOUT)
        os.close(null)
    return open(saved, "w", encoding=stdout.encoding, errors=stdout.errors, closefd=False), saved


def _is_descriptor(stream: TextIO, descriptor: int) -> bool:
    try:
        return stream.fileno() == descriptor
    except (OSError, ValueError):
        return False


def _release(stdout: TextIO | None, output: TextIO, saved: int | None) -> None:
    """Flush *output*, and give standard output back unless the process is about to end."""
    _reserved.pop()
    _saved.clear()
    if not _until_exit:
        sys.stdout = stdout
    try:
        if saved is not None:
            output.close()
    finally:
        if saved is not None and not _until_exit:
            os.dup2(saved, STDOUT)
        if saved is not None:
            os.close(saved)
