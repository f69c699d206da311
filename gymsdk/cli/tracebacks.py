"""`--traceback`: print the whole traceback of an exception in an environment's code on standard error."""

from __future__ import annotations

import logging
import sys
from types import TracebackType
from typing import Annotated, TextIO

import typer

LOGGER_NAME = "gymsdk.tracebacks"
"""The logger that receives the tracebacks."""


class _Handler(logging.StreamHandler[TextIO]):
    """Writes tracebacks to standard error. The subclass tells these handlers from those of a test runner."""


def enable(*, asked: bool) -> None:
    """Print tracebacks from now on if *asked* is set."""
    log = logging.getLogger(LOGGER_NAME)
    log.handlers = [each for each in log.handlers if not isinstance(each, _Handler)]
    if asked:
        log.addHandler(_Handler(sys.stderr))
    log.setLevel(logging.DEBUG if asked else logging.CRITICAL)


def is_enabled() -> bool:
    """Return whether this command prints tracebacks."""
    return any(isinstance(each, _Handler) for each in logging.getLogger(LOGGER_NAME).handlers)


def print_cause(error: BaseException) -> None:
    """Print the traceback of the cause of *error*."""
    cause = error.__cause__ or error
    traceback: TracebackType | None = cause.__traceback__
    sys.excepthook(type(cause), cause, traceback)


Traceback = Annotated[
    bool,
    typer.Option(
        "--traceback",
        callback=lambda asked: enable(asked=asked),
        help="Show whole tracebacks of the environment's code.",
        rich_help_panel="Output",
    ),
]
