"""How users set values: fields of models as options of commands, and the environment variables of gymsdk."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

PANELS = (
    *(BRANCH := "Branch", VIEWER := "Viewer", PACKAGE := "Package", MODEL := "Model", TASKS := "Tasks"),
    *(SETTINGS := "Settings", SAMPLING := "Sampling", LIMITS := "Limits", RUN := "Run", OPEN_LOOP := "Open loop"),
    *(RAY := "Ray", NETWORK := "Network", SECURITY := "Security", FORMAT := "Format", FAULTS := "Faults"),
    *(LOGGING := "Logging", EXPORT := "Export", SELECTION := "Selection", SERVICE := "Service", OUTPUT := "Output"),
)
"""The panels of options, in the order in which the help of a command shows them."""


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


VARIABLES = frozenset(
    {
        "GYMSDK_API_KEY",
        "GYMSDK_BASE_URL",
        "GYMSDK_CA_FILE",
        "GYMSDK_DISABLE",
        "GYMSDK_EVENT_LOOP",
        "GYMSDK_INSECURE",
        "GYMSDK_MODEL",
        "GYMSDK_NO_AUTOREGISTER",
        "GYMSDK_TOKEN_FILE",
        "GYMSDK_WORKERS",
    }
)
"""The environment variables that gymsdk reads."""

KUBERNETES_PATTERN = re.compile(r"GYMSDK_(\w+_)?(SERVICE_(HOST|PORT\w*)|PORT(_\d+_\w+)?)")
"""The variables that Kubernetes sets for services whose names begin with gymsdk."""


def list_unknown_variables(names: Iterable[str]) -> list[str]:
    """Return those of *names* that begin like a variable of gymsdk, and that gymsdk does not read."""
    ours = {name for name in names if name.startswith("GYMSDK_")}
    return sorted(name for name in ours - VARIABLES if not KUBERNETES_PATTERN.fullmatch(name))
