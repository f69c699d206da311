"""`--traceback`: the whole traceback of what an environment's code raised, on standard error."""

from __future__ import annotations

import logging
import sys
from types import TracebackType
from typing import Annotated, TextIO

import typer

LOGGER = "gymsdk.tracebacks"
"""The logger that `gymsdk.plugins.author` writes tracebacks to."""


class _Handler(logging.StreamHandler[TextIO]):
    """Writes tracebacks to standard error; others, such as a test runner, may add handlers for their own purposes."""


def show(*, asked: bool) -> None:
    """Show tracebacks from now on, where that is *asked* for."""
    log = logging.getLogger(LOGGER)
    log.handlers = [each for each in log.handlers if not isinstance(each, _Handler)]
    if asked:
        log.addHandler(_Handler(sys.stderr))
    log.setLevel(logging.DEBUG if asked else logging.CRITICAL)


def is_shown() -> bool:
    """Whether this command shows tracebacks."""
    return any(isinstance(each, _Handler) for each in logging.getLogger(LOGGER).handlers)


def print_cause(error: BaseException) -> None:
    """Print the traceback of what *error* comes from."""
    cause = error.__cause__ or error
    traceback: TracebackType | None = cause.__traceback__
    sys.excepthook(type(cause), cause, traceback)


Traceback = Annotated[
    bool,
    typer.Option(
        "--traceback", callback=lambda asked: show(asked=asked), help="Show whole tracebacks of the environment's code."
    ),
]
