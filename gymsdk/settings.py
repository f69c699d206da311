"""How users see a field of a model: as an option of the commands that take the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MODEL, TASKS, SETTINGS, SAMPLING, LIMITS = "Model", "Tasks", "Settings", "Sampling", "Limits"
RUN, RAY, NETWORK, SECURITY, LOGGING, OUTPUT = "Run", "Ray", "Network", "Security", "Logging", "Output"
"""The panels of options that several commands share."""


@dataclass(frozen=True, slots=True)
class Flag:
    """Makes a field an option of the commands that take its model; a part of the field's annotation.

    The field gives the option its type, its bounds, its default and, by its description, its help.

    Attributes:
        panel: The panel of the help.
        metavar: The name of the value in the help.
        names: The names of the option, by default `--` and the name of the field.
        shown: The default that the help shows, if it is not the field's; `False` shows none.
        help: The help, if it is not the description of the field.
        default: The default on the command line, if it is not the field's.
        takes: The type on the command line, if it is not the field's.
        least: The lowest value on the command line, if it is not the field's.
        layered: Whether files set the field, too, so that the option has no default of its own.
    """

    panel: str
    metavar: str | None = None
    names: tuple[str, ...] = ()
    shown: str | bool | None = None
    help: str | None = None
    default: Any = ...
    takes: Any = None
    least: float | None = None
    layered: bool = False
