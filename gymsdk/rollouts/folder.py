"""The folder of a run: the plan, the rows as sent, and every finished rollout; safe against a kill at any moment."""

from __future__ import annotations

import itertools
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import IO, Any, Self

from gymsdk import jsonl, line, locks
from gymsdk.concurrency import yield_regularly
from gymsdk.errors import BadOutput, GymsdkError
from gymsdk.line import ROLLOUT_INDEX, TASK_INDEX, Key, StoredRollout
from gymsdk.types import Row
from gymsdk.working_folder import get_working_folder, resolve_path, shorten_path


def drop_partial_line(path: Path) -> None:
    """Remove an incomplete last line from the file at *path*."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        size = file.seek(0, os.SEEK_END)
        complete_size = _find_end_of_last_line(file, size)
        if complete_size != size:
            file.truncate(complete_size)


def _find_end_of_last_line(file: IO[bytes], size: int, block: int = 65536) -> int:
    """Return the offset after the last newline of *file*, or 0 if there is none; reads backwards in blocks."""
    while size:
        start = max(0, size - block)
        file.seek(start)
        newline = file.read(size - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        size = start
    return 0


FILES = ("rollouts.jsonl", "failures.jsonl", "inputs.jsonl", "metrics.json", "run.json")
"""The files of a run."""

INPUTS_COMPLETE = "inputs_complete"
"""The key of run.json that says whether inputs.jsonl holds all rows."""

PROFILE_FILES = ("profile.json", "profile.png")
"""The files that `gymsdk profile` adds."""

CREATE_TRIES = 100
"""How many times a process tries to create and lock its folder, which other processes may remove while empty."""


@dataclass(slots=True)
class RunProgress:
    """The progress of a run.

    Attributes:
        done: The positions of the finished rollouts.
        scored: The number of scored rollouts.
        earned: The sum of their rewards.
        failed: The number of rollouts without a reward.
    """

    done: set[Key] = field(default_factory=set)
    scored: int = 0
    earned: float = 0.0
    failed: int = 0


class RunFolder:
    """The files of one run. `with folder:` locks the folder for one process.

    `append` hands a line to the kernel before it returns, so that a killed process loses no rollout that it counted.
    """

    def __init__(self, path: Path) -> None:
        self.path = path = resolve_path(path)
        self.rollouts, self.failures, self.inputs, self.metrics, self.run = (path / name for name in FILES)
        self._discarded = path / "run.old"
        self._open: dict[Path, FileIO] = {}
        self._inputs_file: FileIO | None = None
        self._locked: int | None = None
        self._created: list[Path] = []

    def __enter__(self) -> Self:
        try:
            self._lock()
        except FileExistsError:
            raise BadOutput(f"{shorten_path(self.path)} is a file; name a folder with --output") from None
        except OSError as error:
            raise BadOutput(
                f"cannot write to {shorten_path(self.path)}: {error.strerror}; choose another --output"
            ) from None
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        self.close()
        cause = error.__cause__ if isinstance(error, GymsdkError) else error
        if isinstance(cause, FileNotFoundError) and not self.path.exists():
            raise GymsdkError(
                f"{shorten_path(self.path)} has been removed while the run was writing to it; play the run again"
            ) from error

    def _lock(self) -> None:
        """Create the folder if it is missing, and lock it; raises `BadOutput` if another run holds the lock."""
        missing = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        try:
            self._locked = _create_and_lock(self.path)
            _check_writable(self.path)
        except BaseException:
            # Unless this process holds the lock, the folder belongs to another run.
            self._created = missing if self._locked is not None else missing[1:]
            self.close()
            raise
        self._created = missing

    def close(self) -> None:
        """Close the files, remove the folders that this object created if they are still empty, and unlock."""
        for file in self._open.values():
            file.close()
        self._open.clear()
        if self._inputs_file is not None:
            self._inputs_file.close()
            self._inputs_file = None
            _part_path(self.inputs).unlink(missing_ok=True)
        if self._locked is not None:
            # Before the unlock: the next process that gets the lock notices that the folder is gone, and creates it.
            if self.path in self._created:
                _remove_if_empty(self.path)
            locks.close_folder(self._locked)
            self._locked = None
        for parent in self._created:
            if parent != self.path:
                _lock_and_remove_if_empty(parent)
        self._created.clear()

    @property
    def holds_run(self) -> bool:
        """Whether the folder holds a run, or the remaining files of a run after an interrupted removal."""
        return self.run.exists() or self._discarded.exists()

    @property
    def can_resume(self) -> bool:
        """Whether there is a run to resume."""
        return self.run.exists() and (self.inputs.exists() or self.rollouts.exists())

    def list_foreign_files(self) -> list[str]:
        """Return the names of files that a run would overwrite although no run wrote them."""
        return [] if self.holds_run else [name for name in FILES if (self.path / name).exists()]

    def clear(self) -> None:
        """Remove the files of a run, and no others."""
        if self.run.exists():
            # While this file exists, the other files count as a run's and may be removed.
            self.run.replace(self._discarded)
        for name in (*FILES, *PROFILE_FILES):
            (self.path / name).unlink(missing_ok=True)
        self._discarded.unlink(missing_ok=True)

    def add_inputs(self, lines: bytes) -> None:
        """Append *lines* to the rows to send. Before `start`, they go to a temporary file, which `start` renames."""
        with _convert_write_errors(self.inputs):
            if self._inputs_file is None:
                self._inputs_file = _part_path(self.inputs).open("wb", buffering=0)
            _write(self._inputs_file, lines)

    def start(self, *, settings: Row, about: Row, inputs: Iterable[Row] = (), complete: bool = True) -> None:
        """Write run.json and the rows to send; an earlier run is removed after *inputs* have been read.

        Args:
            settings: The settings that a resume must share with the run.
            about: Further keys of run.json, such as the command and the versions.
            inputs: The rows to send, after those of `add_inputs`.
            complete: Whether these are all rows; if not, `add_inputs` adds the others, and `finish_inputs` ends them.
        """
        fresh = _part_path(self.inputs)
        try:
            self.add_inputs(b"")
            for row in inputs:
                self.add_inputs(jsonl.dump_row(row))
            self.clear()
            # run.json comes first: if the process is killed here, the next run may replace the folder's files.
            self._write_document(self.run, {**about, INPUTS_COMPLETE: complete, "settings": settings, "resumed": []})
            fresh.replace(self.inputs)
            if complete:
                self._close_inputs()
        except BaseException:
            self._close_inputs()
            fresh.unlink(missing_ok=True)
            raise

    def finish_inputs(self) -> None:
        """Record in run.json that all rows to send are in inputs.jsonl."""
        self._close_inputs()
        self._write_document(self.run, {**self.read_about(), INPUTS_COMPLETE: True})

    def _close_inputs(self) -> None:
        if self._inputs_file is not None:
            self._inputs_file.close()
            self._inputs_file = None

    @property
    def has_all_inputs(self) -> bool:
        """Whether inputs.jsonl holds all rows: a killed run may have written only the first ones."""
        # A folder of an earlier version lacks this key.
        return bool(self.read_about().get(INPUTS_COMPLETE, True))

    def read_settings(self) -> Row:
        """Return the settings with which the run was started."""
        settings: Row = self.read_about()["settings"]
        return settings

    def resume(self, resumption: Row, *, repeats: int = 1) -> None:
        """Prepare the folder for a resumed run.

        Adds *resumption* to run.json, and removes incomplete last lines and the failures that are not terminal. Rows
        that an older version wrote once per task are written again, once per repeat. If inputs.jsonl lacks rows,
        `add_inputs` adds them.
        """
        about = self.read_about()
        self._write_document(self.run, {**about, "resumed": [*about["resumed"], resumption]})
        if not self.has_all_inputs:
            drop_partial_line(self.inputs)
            with _convert_write_errors(self.inputs):
                self._inputs_file = self.inputs.open("ab", buffering=0)
        self._number_repeats(repeats)
        for path in (self.rollouts, self.failures):
            drop_partial_line(path)
        terminal = (stored.line for stored in self.read_failures() if stored.terminal)
        _replace_rows(self.failures, terminal)

    def check_lines(self, *, repeats: int = 1) -> None:
        """Check that the files are regular, that no row was sent twice, and that no rollout has two lines or no row.

        Args:
            repeats: How many rollouts each row stands for if an older version wrote the rows once per task.

        Raises:
            BadOutput: A file or a line is wrong; the message names it.
        """
        for path in (self.inputs, self.rollouts, self.failures):
            if path.exists() and not path.is_file():
                raise BadOutput(f"{shorten_path(path)} is not a regular file; choose another --output")
        left = Counter(self._iter_sent_keys(repeats))
        known, has_all_inputs = frozenset(left), self.has_all_inputs
        for path in (self.rollouts, self.failures):
            for number, row in _iter_complete_rows(path):
                # A line in a newer format ends the resume before it changes a file.
                key = _read_key(StoredRollout(row, where=f"{shorten_path(path)}:{number}").line)
                if key is None or (key not in known and has_all_inputs):
                    raise _build_line_error(path, number, "belongs to no task of the run")
                if key in known and left[key] == 0:
                    problem = f"repeats task {key[0]}, repeat {key[1]}, which an earlier line holds"
                    raise _build_line_error(path, number, problem)
                left[key] -= 1

    def _iter_sent_keys(self, repeats: int) -> Iterator[Key]:
        sent: set[Key] = set()
        for number, row in _iter_complete_rows(self.inputs):
            indices = [row.get(ROLLOUT_INDEX)] if ROLLOUT_INDEX in row else range(repeats)
            for key in (_read_key(row | {ROLLOUT_INDEX: index}) for index in indices):
                if key is None:
                    raise _build_line_error(self.inputs, number, "belongs to no task of the run")
                if key in sent and ROLLOUT_INDEX in row:
                    problem = f"repeats task {key[0]}, repeat {key[1]}, which an earlier line holds"
                    raise _build_line_error(self.inputs, number, problem)
                sent.add(key)
                yield key

    def _number_repeats(self, repeats: int) -> None:
        first = next(self.read_inputs(), None)
        if first is None or ROLLOUT_INDEX in first:
            return
        numbered = ({**row, ROLLOUT_INDEX: repeat} for row in self.read_inputs() for repeat in range(repeats))
        _replace_rows(self.inputs, numbered)

    def append(self, row: Row, *, failed: bool = False) -> None:
        """Write the line of a finished rollout."""
        path = self.failures if failed else self.rollouts
        data = jsonl.dump_row(row)
        with _convert_write_errors(path):
            _write(self._get_open_file(path), data)

    def read_inputs(self) -> Iterator[Row]:
        """Yield the rows as they were sent."""
        return (row for _, row in jsonl.read_rows(self.inputs))

    def read_rollouts(self) -> Iterator[StoredRollout]:
        """Yield the scored rollouts."""
        return line.read(self.rollouts) if self.rollouts.exists() else iter(())

    def read_failures(self) -> Iterator[StoredRollout]:
        """Yield the rollouts without a reward."""
        return line.read(self.failures, is_failure=True) if self.failures.exists() else iter(())

    def read_progress(self) -> RunProgress:
        """Return the progress of the run."""
        progress = RunProgress()
        for stored in itertools.chain(self.read_rollouts(), self.read_failures()):
            reward = stored.reward
            progress.done.add(stored.key)
            progress.scored += reward is not None
            progress.failed += reward is None
            progress.earned += reward or 0.0
        return progress

    async def write_metrics(self, pieces: Iterable[bytes]) -> None:
        """Write the metrics in *pieces*, and create the files that no rollout has created.

        The event loop runs its other tasks between the pieces.
        """
        for path in (self.rollouts, self.failures):
            path.touch()
        fresh = _part_path(self.metrics)
        try:
            with _convert_write_errors(self.metrics), fresh.open("wb") as file:
                async for piece in yield_regularly(pieces):
                    file.write(piece)
            with _convert_write_errors(self.metrics):
                fresh.replace(self.metrics)
        finally:
            fresh.unlink(missing_ok=True)

    def read_about(self) -> Row:
        try:
            about = jsonl.parse_json(self.run.read_bytes())
            return {**about, "settings": dict(about["settings"]), "resumed": list(about["resumed"])}
        except (OSError, ValueError, KeyError, TypeError) as error:
            message = f"{shorten_path(self.run)} is missing or unreadable; start over with --overwrite"
            raise BadOutput(message) from error

    def _get_open_file(self, path: Path) -> FileIO:
        if path not in self._open:
            self._open[path] = path.open("ab", buffering=0)
        return self._open[path]

    def _write_document(self, path: Path, value: Any) -> None:
        fresh = _part_path(path)
        with _convert_write_errors(path):
            fresh.write_bytes(jsonl.dump_document(value))
            fresh.replace(path)


def _create_and_lock(path: Path) -> int:
    """Create the folder at *path* if it is missing, and return a descriptor that holds its lock.

    Another process may remove an empty folder at any time before it is locked. The lock is therefore valid only if the
    locked folder is still at *path*.
    """
    for _ in range(CREATE_TRIES):
        try:
            path.mkdir(parents=True, exist_ok=True)
        except FileNotFoundError as error:
            # Another process has removed the parent, or this file system, such as /proc, refuses new folders.
            mkdir_error: OSError | None = error
            continue
        mkdir_error = None
        try:
            descriptor = locks.open_folder(path)
        except FileNotFoundError:
            continue
        try:
            locks.lock(descriptor)
            if _is_same_folder(path, descriptor):
                return descriptor
        except BlockingIOError:
            locks.close_folder(descriptor)
            raise BadOutput(
                f"another run is writing to {shorten_path(path)}; wait for it or choose another --output"
            ) from None
        except OSError:
            locks.close_folder(descriptor)
            raise
        locks.close_folder(descriptor)
    reason = mkdir_error.strerror if mkdir_error else "it is removed as soon as it is created"
    raise BadOutput(f"cannot write to {shorten_path(path)}: {reason}; choose another --output")


def _check_writable(path: Path) -> None:
    if not os.access(path, os.W_OK | os.X_OK):
        raise BadOutput(f"cannot write to {shorten_path(path)}: permission denied; choose another --output")


def _is_same_folder(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _remove_if_empty(folder: Path) -> None:
    # The kernel refuses to remove a folder that is not empty.
    with suppress(OSError):
        folder.rmdir()


def _lock_and_remove_if_empty(folder: Path) -> None:
    """Remove *folder* unless it contains files or a run holds its lock."""
    try:
        descriptor = locks.open_folder(folder)
    except OSError:
        # The folder does not exist: it was never created, or another process has removed it.
        return
    with suppress(BlockingIOError):
        locks.lock(descriptor)
        _remove_if_empty(folder)
    locks.close_folder(descriptor)


@contextmanager
def _convert_write_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise GymsdkError(
            f"cannot write {shorten_path(path)}: {error.strerror}; correct the cause, then use --resume"
        ) from error


def _write(file: FileIO, data: bytes) -> None:
    """Write all of *data* to an unbuffered file."""
    remaining = memoryview(data)
    while remaining:
        remaining = remaining[file.write(remaining) :]


def _replace_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write *rows* to the file at *path*, which is replaced only after all rows have been read and written."""
    fresh = _part_path(path)
    with _convert_write_errors(path), fresh.open("wb") as file:
        file.writelines(map(jsonl.dump_row, rows))
    fresh.replace(path)


def _part_path(path: Path) -> Path:
    return path.with_suffix(".part")


def _iter_complete_rows(path: Path) -> Iterator[tuple[int, Row]]:
    """Yield the rows of a file with their line numbers, without an incomplete last line."""
    for number, data in jsonl.read_lines(path) if path.exists() else ():
        if data.endswith(b"\n"):
            yield number, jsonl.parse_row(data, where=f"{shorten_path(path)}:{number}")


def _build_line_error(path: Path, number: int, problem: str) -> BadOutput:
    return BadOutput(f"{shorten_path(path)}:{number}: the line {problem}; remove it, then use --resume")


def _read_key(line: Row) -> Key | None:
    """Return the position of a line's rollout, or `None` if it has none."""
    task, repeat = line.get(TASK_INDEX), line.get(ROLLOUT_INDEX)
    return (task, repeat) if type(task) is int and type(repeat) is int else None


def create_dated_folder(names: Sequence[str]) -> Path:
    """Create a folder below `rollouts/` with the date and time, and return its path.

    Commands that start in the same second get different folders.
    """
    home = get_working_folder() / "rollouts"
    name = f"{'-'.join(names)}-{time.strftime('%Y%m%d-%H%M%S')}"
    for number in itertools.count(1):
        path = home / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise BadOutput(f"cannot create {shorten_path(path)}: {error.strerror}; choose an --output") from None
        return path
    raise AssertionError("the numbers are endless")


def remove_unused_folder(path: Path) -> None:
    """Remove the folder that `create_dated_folder` has created, and its parent, unless a run has used it."""
    _remove_if_empty(path)
    _lock_and_remove_if_empty(path.parent)
