"""Installed plugins: list them from package metadata without an import, and load one by name.

A plugin is an entry point of a group whose name begins with `gymsdk.`. This module is the only reader of these groups;
what an entry of a group must be is the business of its users: environments (`load`), providers of models
(`gymsdk.models.registry`), executors (`gymsdk.workers.offload`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from email import message_from_string
from functools import cache
from importlib.metadata import Distribution, EntryPoint, distribution, distributions, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gymsdk.errors import (
    BrokenEnvironment,
    BrokenPlugin,
    GymsdkError,
    MissingExtra,
    UnknownEnvironment,
    describe_exception,
    format_suggestion,
)

if TYPE_CHECKING:
    from gymsdk.environment import Environment
    from gymsdk.types import Config

GROUP_PREFIX = "gymsdk."
"""How the names of all groups begin."""

ENVIRONMENTS = "gymsdk.environments"
"""The group of the environments; the name of an entry point is the name of an environment."""

MODELS = "gymsdk.models"
"""The group of the providers of models; the name is the first part of a model's name."""

EXECUTORS = "gymsdk.executors"
"""The group of the executors of offloaded functions."""

OWN_DISTRIBUTION = "gymsdk"

DISTRIBUTION_PREFIX = "gym-env-"
"""The conventional prefix of a distribution's name, which the environment's name follows."""

_NAME_PATTERN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_VERSIONED_NAME_PATTERN = re.compile(r".*-v\d+")


@dataclass(frozen=True, slots=True)
class Entry:
    """The metadata of one installed plugin.

    Attributes:
        name: The plugin's name.
        module: The value of its entry point.
        distribution: The name of the distribution.
        version: The version of the distribution.
        summary: The summary of the distribution.
        error: Why the plugin cannot be loaded; `None` if no reason is known.
        group: The group of its entry point.
    """

    name: str
    module: str
    distribution: str
    version: str
    summary: str = ""
    error: str | None = None
    group: str = ENVIRONMENTS

    @property
    def title(self) -> str:
        """What messages call the plugin."""
        kind = "environment" if self.group == ENVIRONMENTS else f"{self.group} plugin"
        return f"{kind} {self.name!r} ({self.distribution} {self.version})"


def installed() -> dict[str, Entry]:
    """Return all installed environments by name, without those in `GYMSDK_DISABLE=a,b`."""
    return {entry.name: entry for entry in list_entries(ENVIRONMENTS)}


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

    entry, plugin = _load_plugin(name)
    return Environment(name, plugin, settings, version=entry.version)


def load_config_type(name: str) -> type[Config]:
    """Return the type of the settings of an installed environment, which need not be valid.

    Raises:
        UnknownEnvironment: No installed environment has this name.
        BrokenEnvironment: The package cannot be loaded.
    """
    from gymsdk.environment import find_config_type

    return find_config_type(name, _load_plugin(name)[1])


def _load_plugin(name: str) -> tuple[Entry, object]:
    entry = find_entry(ENVIRONMENTS, name)
    if entry is None:
        raise UnknownEnvironment(_format_unknown_environment(name))
    plugin = load_entry(entry)
    if isinstance(plugin, type):
        raise BrokenEnvironment(f"environment {name!r}: {entry.module} is a class; name a module or an instance")
    return entry, plugin


def list_entries(group: str | None = None) -> list[Entry]:
    """Return the installed plugins of *group*, or of all groups, by name; without those in `GYMSDK_DISABLE=a,b`."""
    own = _read_own_entries()
    own_names = {(entry.group, entry.name) for entry in own}
    points, broken = _find_entry_points(group)
    points_by_name: dict[tuple[str, str], list[EntryPoint]] = {}
    for point in points:
        points_by_name.setdefault((point.group, point.name), []).append(point)
    entries = {(entry.group, entry.name): entry for entry in broken}
    entries |= {key: _build_entry(points, is_taken=key in own_names) for key, points in points_by_name.items()}
    hidden = _get_hidden_names()
    found = sorted([*own, *entries.values()], key=lambda entry: (entry.group, entry.name))
    return [entry for entry in found if group in {None, entry.group} and entry.name not in hidden]


def find_entry(group: str, name: str) -> Entry | None:
    """Return the installed plugin *name* of *group*, or `None` if there is none or if it is hidden."""
    if name in _get_hidden_names():
        return None
    # A plugin of gymsdk itself is found without reading the metadata of all distributions.
    own = (entry for entry in _read_own_entries() if (entry.group, entry.name) == (group, name))
    return next(own, None) or next((entry for entry in list_entries(group) if entry.name == name), None)


def load_entry(entry: Entry) -> object:
    """Return the object that an entry point names.

    Raises:
        MissingExtra: It needs packages of an extra that the entry point names in brackets.
        BrokenPlugin: It cannot be imported.
    """
    # Imported here: `import gymnasium` imports this module, and must not import asyncio.
    from gymsdk.concurrency import INTERRUPTS

    kind = BrokenEnvironment if entry.group == ENVIRONMENTS else BrokenPlugin
    if entry.error:
        raise kind(f"{entry.title}: {entry.error}")
    point = EntryPoint(entry.name, entry.module, entry.group)
    try:
        return point.load()
    except (GymsdkError, *INTERRUPTS):
        raise
    except BaseException as error:
        if point.extras and isinstance(error, ModuleNotFoundError):
            extras = f"{entry.distribution}[{','.join(point.extras)}]"
            raise MissingExtra(f"{entry.title} needs further packages: pip install '{extras}'") from error
        raise kind(f"{entry.title} cannot be imported: {describe_exception(error)}") from error


def is_hidden(name: str) -> bool:
    """Return whether `GYMSDK_DISABLE` hides the plugins of this name."""
    return name in _get_hidden_names()


@cache
def _read_own_entries() -> tuple[Entry, ...]:
    """Return the plugins of gymsdk itself.

    The metadata of a source tree may be missing, or older than its code. Then `pyproject.toml` names the plugins.
    """
    try:
        home = distribution(OWN_DISTRIBUTION)
        points, version = _select_plugins(home.entry_points), home.version
    except Exception:  # noqa: BLE001 - missing and damaged metadata raise any exception
        points, version = [], "from source"
    points = points or list(_read_project_points(Path(__file__).parents[2] / "pyproject.toml"))
    return tuple(Entry(point.name, point.value, OWN_DISTRIBUTION, version, group=point.group) for point in points)


def _read_project_points(path: Path) -> Iterator[EntryPoint]:
    import tomllib

    try:
        project = tomllib.loads(path.read_text())["project"]
    except (OSError, ValueError, KeyError):
        return
    if project.get("name") == OWN_DISTRIBUTION:
        for group, points in project.get("entry-points", {}).items():
            yield from _select_plugins(EntryPoint(name, value, group) for name, value in points.items())


def _select_plugins(points: Iterable[EntryPoint]) -> list[EntryPoint]:
    return [point for point in points if point.group.startswith(GROUP_PREFIX)]


def _find_entry_points(group: str | None) -> tuple[list[EntryPoint], list[Entry]]:
    """Return the entry points of other distributions, and entries for environments whose points cannot be read."""
    own = {(entry.group, entry.name, entry.module) for entry in _read_own_entries()}
    points: list[EntryPoint] | None = None
    broken: list[Entry] = []
    if group is not None:
        # One damaged file breaks the listing, but must only affect its own distribution.
        with suppress(Exception):
            points = list(entry_points(group=group))
    if points is None:
        points, broken = _find_entry_points_individually()
    return [point for point in points if (point.group, point.name, point.value) not in own], broken


def _find_entry_points_individually() -> tuple[list[EntryPoint], list[Entry]]:
    points: list[EntryPoint] = []
    broken: list[Entry] = []
    names: set[str] = set()
    for installed in distributions():
        metadata = _read_metadata(installed)
        name = canonicalize_name(metadata.get("Name", ""))
        if name and name in names:
            continue  # shadowed by a distribution earlier on the path
        names.add(name)
        try:
            points += _select_plugins(installed.entry_points)
        except Exception as error:  # noqa: BLE001 - a damaged file may raise any exception
            broken += _build_broken_entries(metadata, error)
    return points, broken


def _build_broken_entries(metadata: dict[str, str], error: Exception) -> list[Entry]:
    """Return an entry if the distribution has the name of an environment's distribution, else nothing."""
    name = canonicalize_name(metadata.get("Name", ""))
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


def canonicalize_name(name: str) -> str:
    """Return *name* in the canonical form of package indexes, in which equal names mean the same distribution."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _get_hidden_names() -> set[str]:
    return {name.strip() for name in os.environ.get("GYMSDK_DISABLE", "").split(",")} - {""}


def _build_entry(points: list[EntryPoint], *, is_taken: bool) -> Entry:
    """Return the entry for the entry points of one name; more than one is an error.

    Args:
        points: The entry points.
        is_taken: Whether gymsdk itself has a plugin of this name, which counts.
    """
    first = points[0]
    metadata = _read_metadata(first.dist)
    error = f"gymsdk itself provides {first.name!r}; choose another name" if is_taken else _find_error(points)
    return Entry(
        name=first.name,
        module=first.value,
        distribution=metadata.get("Name", ""),
        version=metadata.get("Version", ""),
        summary=metadata.get("Summary", ""),
        error=error if metadata else "its metadata cannot be read; reinstall the package",
        group=first.group,
    )


def _read_metadata(home: Distribution | None) -> dict[str, str]:
    """Return the metadata of a distribution, empty if it is missing or damaged."""
    try:
        text = home and (home.read_text("METADATA") or home.read_text("PKG-INFO"))
    except (OSError, ValueError):
        return {}
    return dict(message_from_string(text or ""))


def _find_error(points: list[EntryPoint]) -> str | None:
    first = points[0]
    if len(points) > 1:
        owners = " and ".join(sorted(_read_metadata(point.dist).get("Name", "?") for point in points))
        return f"{len(points)} distributions provide {first.name!r}: {owners}; uninstall all but one"
    if first.group == ENVIRONMENTS and _VERSIONED_NAME_PATTERN.fullmatch(first.name):
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
    if is_hidden(name):
        return f"environment {name!r} is hidden by GYMSDK_DISABLE; remove it from that variable"
    known = installed()
    listed = f"installed: {', '.join(known)}" if known else "none is installed"
    suggestion = format_suggestion(name, known)
    # The message names no package: after a typing error the package might be a stranger's.
    return (
        f"no environment named {name!r}{suggestion} ({listed}); environments are packages: `pip install gym-env-<name>`"
    )
