"""Where environments are found: the entry points of installed packages, listed without importing any of them."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from email import message_from_string
from importlib.metadata import Distribution, EntryPoint, distributions, entry_points
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from gymsdk.errors import BrokenEnvironment, GymsdkError, UnknownEnvironment, format_suggestion

if TYPE_CHECKING:
    from gymsdk.environment import Environment

ENTRY_POINT_GROUP = "gymsdk.environments"
"""The entry-point group; an entry point's name is the environment's."""

DISTRIBUTION_PREFIX = "gym-env-"
"""What the names of distributions begin with that are an environment's; its own name follows."""

_NAME_PATTERN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_VERSIONED_NAME_PATTERN = re.compile(r".*-v\d+")


@dataclass(frozen=True, slots=True)
class Entry:
    """One installed environment as its metadata tells it; *error* says why it cannot be loaded."""

    name: str
    module: str
    distribution: str
    version: str
    summary: str = ""
    error: str | None = None


def installed() -> dict[str, Entry]:
    """Give every installed environment by name; `GYMSDK_DISABLE=a,b` hides names."""
    points, torn = _find_entry_points()
    found: dict[str, list[EntryPoint]] = {}
    for point in points:
        found.setdefault(point.name, []).append(point)
    entries = {entry.name: entry for entry in torn} | {name: _build_entry(points) for name, points in found.items()}
    hidden = _get_hidden_names()
    return {name: entries[name] for name in sorted(entries) if name not in hidden}


def _find_entry_points() -> tuple[list[EntryPoint], list[Entry]]:
    """Give all entry points, and of distributions whose own cannot be read those that tell their name."""
    try:
        return list(entry_points(group=ENTRY_POINT_GROUP)), []
    except Exception:  # noqa: BLE001  # one torn file breaks the listing of all: it shall harm its own distribution alone
        return _find_entry_points_individually()


def _find_entry_points_individually() -> tuple[list[EntryPoint], list[Entry]]:
    points: list[EntryPoint] = []
    torn: list[Entry] = []
    known: set[str] = set()
    for home in distributions():
        told = _read_metadata(home)
        name = _normalize_name(told.get("Name", ""))
        if name and name in known:
            continue  # hidden by one earlier on the path
        known.add(name)
        try:
            points += home.entry_points.select(group=ENTRY_POINT_GROUP)
        except Exception as error:  # noqa: BLE001  # whatever a torn file raises
            torn += _build_broken_entries(told, error)
    return points, torn


def _build_broken_entries(told: dict[str, str], error: Exception) -> list[Entry]:
    """Give the environment of a distribution that has the name of one, though no entry point tells."""
    name = _normalize_name(told.get("Name", ""))
    if not name.startswith(DISTRIBUTION_PREFIX):
        return []
    why = f"its entry_points.txt cannot be read ({error}); reinstall the package"
    return [
        Entry(
            name.removeprefix(DISTRIBUTION_PREFIX),
            "",
            told["Name"],
            told.get("Version", ""),
            told.get("Summary", ""),
            why,
        )
    ]


def _normalize_name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _get_hidden_names() -> set[str]:
    return {name.strip() for name in os.environ.get("GYMSDK_DISABLE", "").split(",")}


def _build_entry(points: list[EntryPoint]) -> Entry:
    first = points[0]
    told = _read_metadata(first.dist)
    return Entry(
        name=first.name,
        module=first.value,
        distribution=told.get("Name", ""),
        version=told.get("Version", ""),
        summary=told.get("Summary", ""),
        error=_find_error(points) if told else "its metadata cannot be read; reinstall the package",
    )


def _read_metadata(home: Distribution | None) -> dict[str, str]:
    """Give what a distribution says of itself, nothing where that is missing or torn."""
    try:
        told = home and (home.read_text("METADATA") or home.read_text("PKG-INFO"))
    except (OSError, ValueError):
        return {}
    return dict(message_from_string(told or ""))


def _find_error(points: list[EntryPoint]) -> str | None:
    first = points[0]
    if len(points) > 1:
        owners = " and ".join(sorted(_read_metadata(point.dist).get("Name", "?") for point in points))
        return f"{len(points)} distributions offer {first.name!r}: {owners}; keep one of them"
    if _VERSIONED_NAME_PATTERN.fullmatch(first.name):
        return f"the name {first.name!r} ends like a Gymnasium version; drop the `-v<digits>`"
    if not _NAME_PATTERN.fullmatch(first.name):
        return f"the name {first.name!r} may hold letters, digits, `_`, `-` and `.` only"
    top = re.split(r"[.:\[\s]", first.value)[0]
    return None if _module_exists(top) else f"its module {top!r} is not there; reinstall the package"


def _module_exists(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def load(name: str, /, **settings: Any) -> Environment:
    """Give the installed environment *name*, configured with *settings*.

    Raises `UnknownEnvironment`, `BrokenEnvironment` where the package cannot be loaded, `BadConfig`.
    """
    from gymsdk.environment import Environment

    entry = installed().get(name)
    if entry is None:
        raise UnknownEnvironment(_format_unknown_environment(name))
    if entry.error:
        raise BrokenEnvironment(f"environment {name!r} ({entry.distribution} {entry.version}): {entry.error}")
    return Environment(name, _import_plugin(entry), settings, version=entry.version)


def _format_unknown_environment(name: str) -> str:
    if name in _get_hidden_names():
        return f"environment {name!r} is hidden by GYMSDK_DISABLE; take it out of that variable"
    known = installed()
    listed = f"installed: {', '.join(known)}" if known else "none is installed"
    near = format_suggestion(name, known)
    # No package is spelt out: of a name that is a slip, it would be somebody else's.
    return f"no environment named {name!r}{near} ({listed}); environments are packages: `pip install gym-env-<name>`"


def _import_plugin(entry: Entry) -> object:
    from gymsdk import errors

    point = EntryPoint(entry.name, entry.module, ENTRY_POINT_GROUP)
    try:
        plugin = point.load()
    except (GymsdkError, *errors.INTERRUPTS):
        raise
    except BaseException as error:
        reason = errors.describe_exception(error)
        where = f"environment {entry.name!r} ({entry.distribution} {entry.version})"
        raise BrokenEnvironment(f"{where} cannot be imported: {reason}") from error
    if isinstance(plugin, type):
        raise BrokenEnvironment(f"environment {entry.name!r}: {entry.module} is a class; name a module or an instance")
    return plugin
