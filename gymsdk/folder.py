"""A run's folder: what was asked, the rows as sent, every finished rollout, safe against a kill at any moment."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import IO, Any, Self

import orjson

from gymsdk import lines, rows
from gymsdk.errors import BadOutput
from gymsdk.jobs import Key
from gymsdk.types import Row

FILES = ("rollouts.jsonl", "failures.jsonl", "inputs.jsonl", "metrics.json", "run.json")
"""What a run writes."""


class RunFolder:
    """The files of one run under *path*; held by one process at a time, as `with folder:`.

    A rollout's line is handed to the kernel whole before `keep` returns, so a killed process loses none it counted.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rollouts, self.failures, self.inputs, self.metrics, self.run = (path / name for name in FILES)
        self._open: dict[Path, IO[bytes]] = {}
        self._held: int | None = None
        self._made = False

    def __enter__(self) -> Self:
        try:
            self._made = not self.path.exists()
            self.path.mkdir(parents=True, exist_ok=True)
            held = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise BadOutput(f"cannot write to {self.path}: {error.strerror}; choose another --output") from None
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(held)
            raise BadOutput(f"another run is writing to {self.path}; wait for it or choose another --output") from None
        self._held = held
        if not os.access(self.path, os.W_OK):
            self.close()
            raise BadOutput(f"cannot write to {self.path}: permission denied; choose another --output")
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the folder."""
        for file in self._open.values():
            file.close()
        self._open.clear()
        if self._held is not None:
            os.close(self._held)
            self._held = None
        if self._made and self.path.is_dir() and not any(self.path.iterdir()):
            self.path.rmdir()

    def holds_a_run(self) -> bool:
        """Whether a run's files are there."""
        return any((self.path / name).exists() for name in FILES)

    def clear(self) -> None:
        """Remove a run's files, and nothing else."""
        for name in FILES:
            (self.path / name).unlink(missing_ok=True)

    def begin(self, settings: Row, about: Row, inputs: Iterable[Row]) -> None:
        """Write down what is asked and the rows to send; whatever run was here goes once all rows are read."""
        fresh = self.inputs.with_suffix(".part")
        try:
            with fresh.open("wb") as file:
                file.writelines(map(rows.line, inputs))
            self.clear()
            fresh.replace(self.inputs)
        finally:
            fresh.unlink(missing_ok=True)
        # Last, since a folder with run.json is one that can be resumed.
        self._write(self.run, {**about, "settings": settings})

    def settings(self) -> Row:
        """Give the settings the folder's run was begun with."""
        try:
            begun: Row = orjson.loads(self.run.read_bytes())["settings"]
        except (OSError, ValueError, KeyError, TypeError):
            raise BadOutput(f"{self.run} is missing or unreadable; start over with --overwrite") from None
        return begun

    def keep(self, line: Row, *, failed: bool = False) -> None:
        """Write one finished rollout's line."""
        file = self._file(self.failures if failed else self.rollouts)
        file.write(rows.line(line))
        file.flush()

    def repair(self) -> None:
        """Cut a torn last line off what a killed run left; forget the failures that a retry can help."""
        for path in (self.rollouts, self.failures):
            if path.exists():
                _cut_torn(path)
        kept = [line for line in self._lines(self.failures) if line.get("_ng_failure_terminal")]
        fresh = self.failures.with_suffix(".part")
        fresh.write_bytes(b"".join(map(rows.line, kept)))
        fresh.replace(self.failures)

    def read_inputs(self) -> Iterator[Row]:
        """Yield the rows as sent."""
        return (row for _, row in rows.read(self.inputs))

    def read_rollouts(self) -> Iterator[Row]:
        """Yield the lines of scored rollouts."""
        return self._lines(self.rollouts)

    def read_failures(self) -> Iterator[Row]:
        """Yield the lines of rollouts without a reward."""
        return self._lines(self.failures)

    def done(self) -> set[Key]:
        """Give the places in the run that are settled: scored, or failed for good."""
        return {lines.key_of(line) for line in chain(self.read_rollouts(), self.read_failures())}

    def _lines(self, path: Path) -> Iterator[Row]:
        return (row for _, row in rows.read(path)) if path.exists() else iter(())

    def conclude(self, metrics: Any) -> None:
        """Write the run's figures."""
        self._write(self.metrics, metrics)

    def _file(self, path: Path) -> IO[bytes]:
        if path not in self._open:
            self._open[path] = path.open("ab")
        return self._open[path]

    def _write(self, path: Path, value: Any) -> None:
        fresh = path.with_suffix(".part")
        fresh.write_bytes(orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS))
        fresh.replace(path)


def _cut_torn(path: Path) -> None:
    with path.open("rb+") as file:
        size = file.seek(0, os.SEEK_END)
        while size and not _ends_whole(file, size):
            size = _last_newline(file, size)
        file.truncate(size)


def _ends_whole(file: IO[bytes], size: int) -> bool:
    file.seek(size - 1)
    return file.read(1) == b"\n"


def _last_newline(file: IO[bytes], size: int, block: int = 65536) -> int:
    """Give the size up to and with the last newline before *size*, 0 where there is none."""
    while size:
        start = max(0, size - block)
        file.seek(start)
        at = file.read(size - start).rfind(b"\n")
        if at >= 0:
            return start + at + 1
        size = start
    return 0
