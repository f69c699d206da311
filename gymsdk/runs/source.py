"""Find the files of a run: a folder that gymsdk wrote, or a JSONL file of rollouts such as NeMo Gym writes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gymsdk import jsonl
from gymsdk.errors import UsageError
from gymsdk.rollouts.folder import FILES
from gymsdk.types import Row
from gymsdk.working_folder import shorten_path

DEFAULT_FOLDER = Path("rollouts")
"""The folder below which `gymsdk rollout` creates the folders of runs."""

NOTES = "notes.jsonl"
"""The file of annotations in a run's folder."""


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
        """Return the content of `run.json`: the settings, the versions and the start of the run; empty without one."""
        return _read_object(self.path / "run.json") if self.path.is_dir() else {}

    def read_metrics(self) -> list[Row]:
        """Return the metrics of each environment, which exist after the end of the run."""
        try:
            metrics = jsonl.parse_json((self.path / "metrics.json").read_bytes())
        except (OSError, ValueError):
            return []
        return [each for each in metrics if isinstance(each, dict)] if isinstance(metrics, list) else []

    def count_inputs(self) -> int | None:
        """Return the number of rollouts that the run asked for, or `None` if the run has no rows as sent."""
        if not self.inputs.exists():
            return None
        with self.inputs.open("rb") as file:
            return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(1 << 20), b""))


def find_run(path: Path) -> RunSource:
    """Return the run at *path*, a folder or a JSONL file.

    Raises:
        UsageError: There is no run.
    """
    if path.is_dir():
        rollouts, failures, inputs, _, run = (path / name for name in FILES)
        if not (rollouts.exists() or failures.exists() or run.exists()):
            raise UsageError(
                f"{shorten_path(path)} holds no run: it has no {FILES[0]}; name a folder that `gymsdk rollout` wrote"
            )
        return RunSource(path, rollouts, failures, inputs)
    if not path.exists():
        raise UsageError(f"{shorten_path(path)} does not exist; name the folder of a run, or a JSONL file of rollouts")
    stem = path.stem.removesuffix("_rollouts")
    # NeMo Gym writes the rows as sent into the first of these files.
    names = (f"{path.stem}_materialized_inputs.jsonl", f"{stem}_inputs.jsonl")
    inputs = next((each for each in map(path.with_name, names) if each.exists()), path.with_name(names[-1]))
    return RunSource(path, path, path.with_name(f"{path.stem}_failures.jsonl"), inputs)


def find_runs(folder: Path = DEFAULT_FOLDER) -> Iterator[RunSource]:
    """Yield the runs in and below *folder*, the newest first."""
    found = {path.parent for name in (FILES[0], FILES[1], FILES[4]) for path in folder.rglob(name)}
    for path in sorted(found, key=lambda each: each.stat().st_mtime, reverse=True):
        yield find_run(path)


def _read_object(path: Path) -> Row:
    try:
        value = jsonl.parse_json(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
