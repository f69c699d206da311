"""Find the files of a run: a folder that gymsdk wrote, or a JSONL file of rollouts such as NeMo Gym writes.

Other programs may have written anything into these files. What cannot be read is named, and the rest is used.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from gymsdk import jsonl
from gymsdk.errors import UsageError
from gymsdk.rollouts.folder import FILES
from gymsdk.types import Row
from gymsdk.working_folder import shorten_path

DEFAULT_FOLDER = Path("rollouts")
"""The folder below which `gymsdk rollout` creates the folders of runs."""

NOTES = "notes.jsonl"
"""The file of annotations in a run's folder."""

MAX_DOCUMENT_DEPTH = 100
"""How deeply `run.json` and `metrics.json` may be nested; no reader of gymsdk expects more."""

ABOUT_TYPES: Mapping[str, type] = {
    "started": str,
    "command": str,
    "folder": str,
    "python": str,
    "platform": str,
    "distributions": dict,
    "settings": dict,
    "resumed": list,
}
"""The types of the values in `run.json` that readers use."""

SETTINGS_TYPES: Mapping[str, type] = {"environments": dict, "model": str, "budget": dict, "sampling": dict}
"""The types of the values of `settings` in `run.json` that readers use."""

METRICS_TYPES: Mapping[str, type] = {"environment": str, "outcomes": dict, "agent_metrics": dict}
"""The types of the values of each element of `metrics.json` that readers use."""

_KINDS: tuple[tuple[Callable[[int], bool], str], ...] = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
)


COPY_SECONDS = 2.0
"""How much later than its metrics the rollouts of a run may be written, by a program that copies the run."""


@dataclass(frozen=True)
class RunSource:
    """The files of a run.

    Attributes:
        path: The folder, or the JSONL file of a run without one.
        rollouts: The file of the scored rollouts.
        failures: The file of the rollouts without a reward; it need not exist.
        inputs: The file of the rows as sent; it need not exist.
    """

    path: Path
    rollouts: Path
    failures: Path
    inputs: Path

    @property
    def name(self) -> str:
        """The name of the folder, or of the file without its suffix."""
        return self.path.name if self.path.is_dir() else self.path.stem

    @property
    def folder(self) -> Path:
        """The folder with the files."""
        return self.rollouts.parent

    @property
    def files(self) -> tuple[Path, Path]:
        """The files with the lines of rollouts, which exist as soon as they have a line."""
        return self.rollouts, self.failures

    def read_about(self) -> Row:
        """Return the content of `run.json`: the settings, the versions and the start of the run; empty without one.

        Values with another type than readers expect are left out, and `list_bad_files` names them.
        """
        return self._read_about()[0]

    def read_metrics(self) -> list[Row]:
        """Return the metrics of each environment, which exist after the end of the run.

        Values with another type than readers expect are left out, and `list_bad_files` names them.
        """
        return self._read_metrics()[0]

    def are_metrics_current(self) -> bool:
        """Return whether the metrics, if there are any, were written after the lines of the rollouts."""
        try:
            written = (self.path / "metrics.json").stat().st_ctime
        except OSError:
            return True
        # No program can set this time back. The files of a copy are written one after the other.
        return all(_get_change_time(path) <= written + COPY_SECONDS for path in self.files)

    def count_inputs(self) -> int | None:
        """Return the number of rollouts that the run asked for, or `None` if the run has no readable rows as sent."""
        try:
            with open_regular(self.inputs) as file:
                return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(1 << 20), b""))
        except OSError:
            return None

    def list_bad_files(self) -> list[Row]:
        """Return the `file` and a `message` for each file of the run that exists and cannot be read as it should."""
        if not self.path.exists():
            return [{"file": self.name, "message": "the run does not exist any more"}]
        found = [(path.name, find_read_error(path)) for path in (*self.files, self.inputs)]
        found += [("run.json", error) for error in self._read_about()[1]]
        found += [("metrics.json", error) for error in self._read_metrics()[1]]
        return [{"file": name, "message": message} for name, message in found if message]

    def _read_about(self) -> tuple[Row, list[str]]:
        value, errors = _read_document(self.path, "run.json", dict)
        about = _keep_typed(value or {}, ABOUT_TYPES, "", errors)
        settings = _keep_typed(about.get("settings") or {}, SETTINGS_TYPES, "settings.", errors)
        environments = settings.get("environments") or {}
        types = dict.fromkeys(environments, dict)
        kept = _keep_typed(environments, types, "settings.environments.", errors)
        # An environment with unreadable settings is still an environment of the run.
        settings |= {"environments": {name: kept.get(name, {}) for name in environments}} if environments else {}
        return about | ({"settings": settings} if "settings" in about else {}), errors

    def _read_metrics(self) -> tuple[list[Row], list[str]]:
        value, errors = _read_document(self.path, "metrics.json", list)
        metrics = []
        for number, entry in enumerate(value or []):
            if isinstance(entry, dict):
                metrics.append(_keep_typed(entry, METRICS_TYPES, f"[{number}].", errors))
            else:
                errors.append(f"[{number}] must be an object, got {_describe_type(entry)}")
        return metrics, errors


def find_run(path: Path) -> RunSource:
    """Return the run at *path*, a folder or a JSONL file.

    Raises:
        UsageError: There is no run.
    """
    try:
        return _find_run(path)
    except PermissionError as error:
        raise UsageError(f"{shorten_path(path)} cannot be read: {error.strerror}") from error


def _find_run(path: Path) -> RunSource:
    if path.is_dir():
        rollouts, failures, inputs, _, run = (path / name for name in FILES)
        if not (rollouts.exists() or failures.exists() or run.exists()):
            raise UsageError(
                f"{shorten_path(path)} holds no run: it has no {FILES[0]}; name a folder that `gymsdk rollout` wrote"
            )
        return RunSource(path, rollouts, failures, inputs)
    if not path.exists():
        raise UsageError(f"{shorten_path(path)} does not exist; name the folder of a run, or a JSONL file of rollouts")
    if not path.is_file():
        raise UsageError(
            f"{shorten_path(path)} is {_describe_kind(path.stat().st_mode)}, which cannot be indexed;"
            " name the folder of a run, or a JSONL file of rollouts"
        )
    stem = path.stem.removesuffix("_rollouts")
    # NeMo Gym writes the rows as sent into the first of these files.
    names = (f"{path.stem}_materialized_inputs.jsonl", f"{stem}_inputs.jsonl")
    inputs = next(
        (candidate for candidate in map(path.with_name, names) if candidate.exists()), path.with_name(names[-1])
    )
    return RunSource(path, path, path.with_name(f"{path.stem}_failures.jsonl"), inputs)


def find_runs(folder: Path = DEFAULT_FOLDER) -> Iterator[RunSource]:
    """Yield the runs in and below *folder*, the newest first."""
    names = {FILES[0], FILES[1], FILES[4]}
    found = [Path(path) for path, folders, files in os.walk(folder) if not names.isdisjoint((*folders, *files))]
    for path in sorted(found, key=_get_time, reverse=True):
        try:
            source = find_run(path)
        except UsageError:
            # The run has been removed meanwhile.
            continue
        yield source


def get_default_path(source: RunSource) -> Path:
    """Return the path of the run's index in the user's cache folder."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gymsdk" / "runs"
    digest = hashlib.blake2b(os.fsencode(source.path.resolve()), digest_size=8).hexdigest()
    return cache / f"{source.name[:80]}-{digest}.sqlite"


def open_regular(path: Path) -> IO[bytes]:
    """Open a regular file for reading.

    Raises:
        OSError: The file cannot be read, or it is not a regular file: a FIFO would wait for a writer, and a device may
            never end.
    """
    _check_regular(path.stat().st_mode)
    # The file may have been replaced by a FIFO since the check.
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    try:
        _check_regular(os.fstat(file.fileno()).st_mode)
    except OSError:
        file.close()
        raise
    return file


def find_read_error(path: Path) -> str | None:
    """Return why a file that exists cannot be read, or `None`."""
    try:
        open_regular(path).close()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        return error.strerror or str(error)
    return None


def _get_change_time(path: Path) -> float:
    try:
        return path.stat().st_ctime
    except OSError:
        return 0.0


def _get_time(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _check_regular(mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, f"it is {_describe_kind(mode)}, not a regular file")


def _describe_kind(mode: int) -> str:
    return next((name for is_kind, name in _KINDS if is_kind(mode)), "a device")


def _read_document(path: Path, name: str, kind: type) -> tuple[Any, list[str]]:
    """Return the JSON value of the given type in the file *name* of a run's folder, and why there is none."""
    try:
        return _parse_document(path / name, kind) if path.is_dir() else None, []
    except FileNotFoundError:
        return None, []
    except OSError as error:
        return None, [error.strerror or str(error)]
    except ValueError as error:
        return None, [str(error)]


def _parse_document(path: Path, kind: type) -> Any:
    with open_regular(path) as file:
        data = file.read()
    try:
        value = jsonl.parse_json(data)
    except ValueError as error:
        raise ValueError(f"not valid JSON: {error}") from None
    if not isinstance(value, kind):
        raise ValueError(f"it must be {_describe_type(kind())}, got {_describe_type(value)}")  # noqa: TRY004  # as for other content
    if jsonl.measure_depth(value) > MAX_DOCUMENT_DEPTH:
        raise ValueError(f"more than {MAX_DOCUMENT_DEPTH} levels are nested")
    return value


def _keep_typed(value: Row, types: Mapping[str, type], prefix: str, errors: list[str]) -> Row:
    """Return *value* without values that are neither null nor of their type, and add their errors to *errors*."""
    kept = {}
    for key, member in value.items():
        kind = types.get(key)
        if kind is None or member is None or isinstance(member, kind):
            kept[key] = member
        else:
            errors.append(f"`{prefix}{key}` must be {_describe_type(kind())}, got {_describe_type(member)}")
    return kept


def _describe_type(value: object) -> str:
    """Return the name of the JSON type of *value*."""
    if value is None:
        return "null"
    names = {bool: "a truth value", str: "text", dict: "an object", list: "a list"}
    return names.get(type(value), "a number")
