"""Installed environments: list them from package metadata without an import, and load one by name."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from email import message_from_string
from importlib.metadata import Distribution, EntryPoint, distributions, entry_points
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from gymsdk.errors import BrokenEnvironment, GymsdkError, UnknownEnvironment, describe_exception, format_suggestion

if TYPE_CHECKING:
    from gymsdk.environment import Environment

ENTRY_POINT_GROUP = "gymsdk.environments"
"""The entry-point group; the name of an entry point is the name of an environment."""

DISTRIBUTION_PREFIX = "gym-env-"
"""The conventional prefix of a distribution's name, which the environment's name follows."""

_NAME_PATTERN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_VERSIONED_NAME_PATTERN = re.compile(r".*-v\d+")


@dataclass(frozen=True, slots=True)
class Entry:
    """The metadata of one installed environment.

    Attributes:
        name: The environment's name.
        module: The value of its entry point.
        distribution: The name of the distribution.
        version: The version of the distribution.
        summary: The summary of the distribution.
        error: Why the environment cannot be loaded; `None` if no reason is known.
    """

    name: str
    module: str
    distribution: str
    version: str
    summary: str = ""
    error: str | None = None


def installed() -> dict[str, Entry]:
    """Return all installed environments by name, without those in `GYMSDK_DISABLE=a,b`."""
    points, broken = _find_entry_points()
    points_by_name: dict[str, list[EntryPoint]] = {}
    for point in points:
        points_by_name.setdefault(point.name, []).append(point)
    entries = {entry.name: entry for entry in broken}
    entries |= {name: _build_entry(points) for name, points in points_by_name.items()}
    hidden = _get_hidden_names()
    return {name: entries[name] for name in sorted(entries) if name not in hidden}


def load(name: str, /, **settings: Any) -> Environment:
    """Load an installed environment.

    Args:
        name: The environment's name.
        **settings: Its settings.

    Raises:
        UnknownEnvironment: No installed environment has this name.
        BrokenEnvironment: The package cannot be loaded.
        BadConfig: A setting is missing or wrong.
    """
    from gymsdk.environment import Environment

    entry = installed().get(name)
    if entry is None:
        raise UnknownEnvironment(_format_unknown_environment(name))
    if entry.error:
        raise BrokenEnvironment(f"environment {name!r} ({entry.distribution} {entry.version}): {entry.error}")
    return Environment(name, _import_plugin(entry), settings, version=entry.version)


def _find_entry_points() -> tuple[list[EntryPoint], list[Entry]]:
    """Return all entry points, and entries for environments whose entry points cannot be read."""
    try:
        return list(entry_points(group=ENTRY_POINT_GROUP)), []
    except Exception:  # noqa: BLE001 - one damaged file breaks the listing, but must only affect its own distribution
        return _find_entry_points_individually()


def _find_entry_points_individually() -> tuple[list[EntryPoint], list[Entry]]:
    points: list[EntryPoint] = []
    broken: list[Entry] = []
    names: set[str] = set()
    for distribution in distributions():
        metadata = _read_metadata(distribution)
        name = _normalize_name(metadata.get("Name", ""))
        if name and name in names:
            continue  # shadowed by a distribution earlier on the path
        names.add(name)
        try:
            points += distribution.entry_points.select(group=ENTRY_POINT_GROUP)
        except Exception as error:  # noqa: BLE001 - a damaged file may raise any exception
            broken += _build_broken_entries(metadata, error)
    return points, broken


def _build_broken_entries(metadata: dict[str, str], error: Exception) -> list[Entry]:
    """Return an entry if the distribution has the name of an environment's distribution, else nothing."""
    name = _normalize_name(metadata.get("Name", ""))
    if not name.startswith(DISTRIBUTION_PREFIX):
        return []
    return [
        Entry(
            name=name.removeprefix(DISTRIBUTION_PREFIX),
            module="",
            distribution=metadata["Name"],
            version=metadata.get("Version", ""),
            summary=metadata.get("Summary", ""),
            error=f"its entry_points.txt cannot be read ({error}); reinstall the package",
        )
    ]


def _normalize_name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _get_hidden_names() -> set[str]:
    return {name.strip() for name in os.environ.get("GYMSDK_DISABLE", "").split(",")}


def _build_entry(points: list[EntryPoint]) -> Entry:
    """Return the entry for the entry points of one name; more than one is an error."""
    first = points[0]
    metadata = _read_metadata(first.dist)
    return Entry(
        name=first.name,
        module=first.value,
        distribution=metadata.get("Name", ""),
        version=metadata.get("Version", ""),
        summary=metadata.get("Summary", ""),
        error=_find_error(points) if metadata else "its metadata cannot be read; reinstall the package",
    )


def _read_metadata(distribution: Distribution | None) -> dict[str, str]:
    """Return the metadata of a distribution, empty if it is missing or damaged."""
    try:
        text = distribution and (distribution.read_text("METADATA") or distribution.read_text("PKG-INFO"))
    except (OSError, ValueError):
        return {}
    return dict(message_from_string(text or ""))


def _find_error(points: list[EntryPoint]) -> str | None:
    first = points[0]
    if len(points) > 1:
        owners = " and ".join(sorted(_read_metadata(point.dist).get("Name", "?") for point in points))
        return f"{len(points)} distributions provide {first.name!r}: {owners}; uninstall all but one"
    if _VERSIONED_NAME_PATTERN.fullmatch(first.name):
        return f"the name {first.name!r} ends like a Gymnasium version; remove the `-v<digits>`"
    if not _NAME_PATTERN.fullmatch(first.name):
        return f"the name {first.name!r} may contain only letters, digits, `_`, `-` and `.`"
    package = re.split(r"[.:\[\s]", first.value)[0]
    return None if _module_exists(package) else f"its module {package!r} does not exist; reinstall the package"


def _module_exists(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _format_unknown_environment(name: str) -> str:
    if name in _get_hidden_names():
        return f"environment {name!r} is hidden by GYMSDK_DISABLE; remove it from that variable"
    known = installed()
    listed = f"installed: {', '.join(known)}" if known else "none is installed"
    suggestion = format_suggestion(name, known)
    # The message names no package: after a typing error the package might be a stranger's.
    return (
        f"no environment named {name!r}{suggestion} ({listed}); environments are packages: `pip install gym-env-<name>`"
    )


def _import_plugin(entry: Entry) -> object:
    # Imported here: `import gymnasium` imports this module, and must not import asyncio.
    from gymsdk.concurrency import INTERRUPTS

    point = EntryPoint(entry.name, entry.module, ENTRY_POINT_GROUP)
    try:
        plugin = point.load()
    except (GymsdkError, *INTERRUPTS):
        raise
    except BaseException as error:
        reason = describe_exception(error)
        where = f"environment {entry.name!r} ({entry.distribution} {entry.version})"
        raise BrokenEnvironment(f"{where} cannot be imported: {reason}") from error
    if isinstance(plugin, type):
        raise BrokenEnvironment(f"environment {entry.name!r}: {entry.module} is a class; name a module or an instance")
    return plugin
