"""`--traceback`: the whole traceback of what an environment's code raised, on standard error."""

from __future__ import annotations

import logging
import sys
from types import TracebackType
from typing import Annotated, TextIO

import typer

LOGGER_NAME = "gymsdk.tracebacks"
"""The logger that `gymsdk.plugins.calls` writes tracebacks to."""


class _Handler(logging.StreamHandler[TextIO]):
    """Writes tracebacks to standard error; others, such as a test runner, may add handlers for their own purposes."""


def enable(*, asked: bool) -> None:
    """Show tracebacks from now on, where that is *asked* for."""
    log = logging.getLogger(LOGGER_NAME)
    log.handlers = [each for each in log.handlers if not isinstance(each, _Handler)]
    if asked:
        log.addHandler(_Handler(sys.stderr))
    log.setLevel(logging.DEBUG if asked else logging.CRITICAL)


def is_enabled() -> bool:
    """Whether this command shows tracebacks."""
    return any(isinstance(each, _Handler) for each in logging.getLogger(LOGGER_NAME).handlers)


def print_cause(error: BaseException) -> None:
    """Print the traceback of what *error* comes from."""
    cause = error.__cause__ or error
    traceback: TracebackType | None = cause.__traceback__
    sys.excepthook(type(cause), cause, traceback)


Traceback = Annotated[
    bool,
    typer.Option(
        "--traceback",
        callback=lambda asked: enable(asked=asked),
        help="Show whole tracebacks of the environment's code.",
    ),
]
