"""Index the rollouts of a run in a SQLite file, so that a viewer lists, sorts, filters and searches them quickly.

The index lies in the user's cache folder and can be deleted at any time: the run's folder may be read-only, and its
lock is never taken. Lines are read where they are in the run's files, by offset and length. `gymsdk.runs.file_state`
recognizes files that were rewritten, which are indexed again.

Two passes fill the index. The first reads the values of each rollout (`gymsdk.runs.records`); the second reads the
texts for the search. Both continue where they stopped, also while the run appends lines.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import IO, Any

from gymsdk import jsonl, line
from gymsdk.errors import GymsdkError
from gymsdk.line import StoredRollout
from gymsdk.rollouts.inputs import InputIndex
from gymsdk.rollouts.jobs import compute_line_digest, compute_task_digest
from gymsdk.runs.file_state import FileState, Verification, extend_digest, is_settled, sign
from gymsdk.runs.notes import RunNotes
from gymsdk.runs.records import parse_record
from gymsdk.runs.schema import (
    FAILURES,
    INDEXES,
    INPUTS,
    INSERT_TEXT,
    VERSION,
    Batch,
    are_texts_indexed,
    count_change,
    create_tables,
    forget,
    has_search,
    join_texts,
    read_state,
    transaction,
    update_notes,
    write_state,
    write_texts_done,
)
from gymsdk.runs.source import RunSource, get_default_path, open_regular
from gymsdk.types import Row

MAX_NAMED_LINES = 20
"""The number of lines of a file that are not rollouts of which the numbers are kept."""

MAX_LINE_DEPTH = 200
"""How deeply a line may be nested; orjson does not write much more, so that no answer could show the line."""

COMMIT_SECONDS = 0.5
"""How long a pass reads before it makes its rows visible to readers."""

LOCK_SECONDS = 30.0
"""Seconds that a process waits for another process that writes to the same index."""

TEXT_SCHEMA = """
CREATE VIRTUAL TABLE text USING fts5 (content, content='', detail=none, columnsize=0, tokenize='unicode61');
CREATE TABLE texts_done (id INTEGER);
"""

_DEPTHS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}

_NO_BRACKETS = bytes(byte for byte in range(256) if byte not in _DEPTHS)

_NO_BAD_LINES: dict[str, Any] = {"bad": 0, "bad_message": "", "bad_lines": ""}


class RunIndex:
    """The index of one run.

    Args:
        source: The run.
        path: The SQLite file; by default one in the user's cache folder.

    Raises:
        GymsdkError: The index cannot be written.
    """

    def __init__(self, source: RunSource, path: Path | None = None) -> None:
        self.source = source
        self.path = path or get_default_path(source)
        self.notes = RunNotes(source)
        self._verifications: dict[int, tuple[Verification, bool]] = {}
        try:
            self._prepare_file()
        except (OSError, sqlite3.Error) as error:
            raise GymsdkError(
                f"the index {self.path} cannot be written ({error}); set XDG_CACHE_HOME to a folder that can"
            ) from error

    def connect(self) -> sqlite3.Connection:
        """Return a new connection that reads the index while other connections write to it."""
        connection = sqlite3.connect(self.path, timeout=LOCK_SECONDS, isolation_level=None, check_same_thread=False)
        connection.row_factory = sqlite3.Row
        connection.execute("PRAGMA journal_mode = WAL")
        # The index can be built again; a crash of the machine may lose its last rows.
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute("PRAGMA temp_store = MEMORY")
        return connection

    def update(self) -> bool:
        """Bring the index up to date with the run's files; return whether anything changed.

        A large file that may have been rewritten is hashed, at about a second per gigabyte.
        """
        changed = False
        for number in range(len(self.source.files)):
            found = self.update_lines([number])
            if not found:
                # A large file that has just grown is left to the next update, lest a growing run is hashed at each.
                self.verify(numbers=[number])
                found = self.update_lines([number])
            changed |= found
        return changed

    def update_lines(self, numbers: Sequence[int] = (0, 1)) -> bool:
        """Index the new lines of the files with these numbers, and rewritten files as far as that is soon known.

        Returns:
            Whether anything changed.
        """
        # Someone may have removed the index meanwhile.
        self._prepare_file()
        with closing(self.connect()) as connection:
            changed = [self._update_file(connection, number) for number in numbers]
            # Even if nothing changed: a process may have been interrupted before it created them.
            for statement in INDEXES:
                connection.execute(statement)
            changed.append(update_notes(connection, self.notes))
        return any(changed)

    def verify(self, seconds: float | None = None, numbers: Sequence[int] = (0, 1)) -> bool:
        """Hash large files that may have been rewritten, and forget the rollouts of rewritten files.

        Args:
            seconds: Return after about this time; the next call continues.
            numbers: The numbers of the files.

        Returns:
            Whether all files are hashed.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        with closing(self.connect()) as connection:
            return not [number for number in numbers if not self._verify_file(connection, number, deadline)]

    def update_texts(self, seconds: float | None = None) -> bool:
        """Read the texts of rollouts that are not searchable yet; return whether all are.

        Args:
            seconds: Return after about this time.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        with closing(self.connect()) as connection:
            if not has_search(connection):
                return True
            while deadline is None or time.monotonic() < deadline:
                if not self._index_texts(connection):
                    return True
        return False

    def update_tasks(self) -> None:
        """Find the digest of the row as sent of each new task, on its lines or from the run's inputs.

        The digest of a task is `NULL` if neither has it; see `update_line_digests`.
        """
        with closing(self.connect()) as connection:
            state = self._observe_inputs()
            stored = read_state(connection, INPUTS)
            is_current = stored is not None and replace(stored, **_NO_BAD_LINES) == state and state.is_trusted
            digested = "SELECT 1 FROM task t WHERE t.environment = r.environment AND t.task = r.task"
            found = connection.execute(
                "SELECT environment, task, max(digest) FROM rollout r"  # noqa: S608  # a constant condition
                + (f" WHERE NOT EXISTS ({digested})" if is_current else "")
                + " GROUP BY environment, task"
            ).fetchall()
            if not found:
                return
            rows, state = self._read_inputs(state)
            with transaction(connection):
                for environment, task, own in found:
                    row = rows.get(task) if own is None else None
                    digest = own if row is None else compute_task_digest(row, environment)
                    connection.execute(
                        "INSERT OR REPLACE INTO task VALUES (?, ?, ?, NULL)", (environment, task, digest)
                    )
                write_state(connection, INPUTS, state)

    def update_line_digests(self) -> None:
        """Compute the digest of the first line of each task that has none.

        Two copies of a run have equal lines, also if nothing says which row was sent: the messages that `reset` adds
        make the digest of a line another one than that of the row.
        """
        with closing(self.connect()) as connection:
            unknown = connection.execute(
                "SELECT t.environment, t.task, min(r.id) FROM task t JOIN rollout r ON r.environment = t.environment"
                " AND r.task = t.task WHERE t.line_digest IS NULL GROUP BY t.environment, t.task"
            ).fetchall()
            with transaction(connection):
                for environment, task, rollout in unknown:
                    digest = compute_line_digest(self.read(connection, rollout).line, environment)
                    connection.execute(
                        "UPDATE task SET line_digest = ? WHERE environment = ? AND task = ?",
                        (digest, environment, task),
                    )

    def read(self, connection: sqlite3.Connection, rollout: int) -> StoredRollout:
        """Return the stored line of the rollout with this id; raises `GymsdkError` if the file has changed."""
        data, place = self._read_bytes(connection, rollout)
        is_failure = place["file"] == FAILURES
        return line.parse(data, number=place["task"], where=str(self.source.path), is_failure=is_failure)

    def read_bytes(self, connection: sqlite3.Connection, rollout: int) -> bytes:
        """Return the bytes of the stored line of the rollout with this id."""
        return self._read_bytes(connection, rollout)[0]

    def _read_bytes(self, connection: sqlite3.Connection, rollout: int) -> tuple[bytes, sqlite3.Row]:
        place = connection.execute("SELECT file, offset, length, task FROM rollout WHERE id = ?", (rollout,)).fetchone()
        if place is None:
            raise GymsdkError(f"{self.source.path} has no rollout with the id {rollout} any more; reload")
        with self.open_file(place["file"]) as file:
            return os.pread(file.fileno(), place["length"], place["offset"]), place

    def open_file(self, number: int) -> IO[bytes]:
        """Return a file of the run, opened for reading; raises `GymsdkError` if it cannot be read."""
        try:
            return open_regular(self.source.files[number])
        except OSError as error:
            raise GymsdkError(f"{self.source.files[number]}: {error.strerror}") from error

    def _prepare_file(self) -> None:
        """Create the index, or replace a file that is damaged or of another version."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._prepare()
        except sqlite3.OperationalError:
            raise
        except sqlite3.DatabaseError:
            for suffix in ("", "-wal", "-shm"):
                Path(f"{self.path}{suffix}").unlink(missing_ok=True)
            self._prepare()

    def _prepare(self) -> None:
        with closing(self.connect()) as connection:
            [version] = connection.execute("PRAGMA user_version").fetchone()
            if version == VERSION:
                return
            with transaction(connection):
                # Another process may have created the schema meanwhile.
                [version] = connection.execute("PRAGMA user_version").fetchone()
                if version == VERSION:
                    return
                create_tables(connection)
                _create_text_tables(connection)

    def _update_file(self, connection: sqlite3.Connection, number: int) -> bool:
        """Index the new lines of a file; return whether anything changed."""
        changed = False
        while self._index_part(connection, number):
            changed = True
        return changed

    def _index_part(self, connection: sqlite3.Connection, number: int) -> bool:
        """Index new lines of a file for a short time; return whether anything changed."""
        if self._is_indexed(read_state(connection, number), number):
            return False
        with transaction(connection):
            # Another process may have indexed the file until now, so that an earlier status is older than the state.
            state = read_state(connection, number)
            try:
                file = open_regular(self.source.files[number])
            except OSError:
                return forget(connection, number)
            with file:
                stat = os.fstat(file.fileno())
                checked = state and state.check(file, stat)
                forgotten = False
                if checked is None:
                    forgotten = forget(connection, number)
                    checked = FileState().observe(stat, is_trusted=is_settled(stat))
                return self._index_lines(connection, file, number, checked) or forgotten

    def _is_indexed(self, state: FileState | None, number: int) -> bool:
        """Return whether the file with the *state* looks as it did when it was indexed."""
        try:
            with open_regular(self.source.files[number]) as file:
                stat = os.fstat(file.fileno())
        except OSError:
            return state is None
        return state is not None and state.is_same(stat) and (state.is_trusted or not state.is_small)

    def _index_lines(self, connection: sqlite3.Connection, file: IO[bytes], number: int, state: FileState) -> bool:
        """Index complete lines after the state's offset for a short time; return whether there are any."""
        until = time.monotonic() + COMMIT_SECONDS
        started = state.offset
        # Changed in place: new states for each line took 9 of 220 µs.
        state = replace(state)
        # A viewer that follows a run parses each new line once for both passes.
        batch = Batch(connection, with_texts=started > 0 and are_texts_indexed(connection))
        file.seek(started)
        for data in file:
            if not data.endswith(b"\n"):
                # The run is writing this line.
                break
            self._index_line(batch, data, number, state)
            if time.monotonic() > until:
                state.size = state.offset
                break
        batch.write()
        write_state(connection, number, sign(file.fileno(), state))
        if state.offset == started:
            return False
        count_change(connection)
        return True

    def _index_line(self, batch: Batch, data: bytes, number: int, state: FileState) -> None:
        """Add the record of a line to *batch*, and advance *state* to the end of the line."""
        index, offset = state.lines, state.offset
        state.digest = extend_digest(state.digest, data)
        state.offset += len(data)
        state.lines += 1
        if not data.strip():
            return
        where = f"{self.source.files[number].name}:{state.lines}"
        try:
            stored = line.parse(data, number=index, where=where, is_failure=number == FAILURES, exact=False)
            _check_depth(data, stored.line)
            record = parse_record(stored)
            batch.add(record, stored, (number, offset, len(data)))
        except GymsdkError as error:
            state.add_bad_line(state.lines, str(error), MAX_NAMED_LINES)
            return
        except Exception as error:  # noqa: BLE001  # another program may have written anything into the file
            state.add_bad_line(state.lines, f"{where}: {str(error) or type(error).__name__}", MAX_NAMED_LINES)
            return
        state.rollouts += 1
        state.scored += record.reward is not None
        state.earned += record.reward or 0.0

    def _verify_file(self, connection: sqlite3.Connection, number: int, deadline: float | None) -> bool:
        """Hash the indexed part of a large file until *deadline*; return whether nothing is left to hash."""
        state = read_state(connection, number)
        if state is None or state.is_trusted or state.is_small:
            self._verifications.pop(number, None)
            return True
        try:
            file = open_regular(self.source.files[number])
        except OSError:
            # The file is being replaced; the first pass will notice.
            return True
        with file:
            stat = os.fstat(file.fileno())
            if not state.is_same(stat):
                return True
            verification, was_settled = self._verifications.pop(number, (None, False))
            if verification is None or verification.state != state:
                verification, was_settled = Verification(state), is_settled(stat)
            is_unchanged = verification.advance(file, deadline)
        if is_unchanged is None:
            self._verifications[number] = verification, was_settled
            return False
        with transaction(connection):
            if read_state(connection, number) != state:
                # Another process was faster.
                return True
            if is_unchanged:
                write_state(connection, number, replace(state, is_trusted=was_settled))
            else:
                forget(connection, number)
        return True

    def _index_texts(self, connection: sqlite3.Connection) -> bool:
        """Make some rollouts searchable; return whether there were any."""
        until = time.monotonic() + COMMIT_SECONDS
        with transaction(connection):
            [last] = connection.execute("SELECT coalesce(max(id), 0) FROM texts_done").fetchone()
            waiting = connection.execute(
                "SELECT id, file, offset, length FROM rollout WHERE id > ? ORDER BY id LIMIT 1000", (last,)
            ).fetchall()
            for rollout, number, offset, length in waiting:
                try:
                    data = _read_at(self.source.files[number], offset, length)
                    content = join_texts(line.parse(data, number=0, where="", exact=False))
                except (GymsdkError, OSError):
                    # The file is being replaced; the first pass will notice.
                    content = ""
                connection.execute(INSERT_TEXT, (rollout, content))
                last = rollout
                if time.monotonic() > until:
                    break
            write_texts_done(connection, last)
        return bool(waiting)

    def _observe_inputs(self) -> FileState:
        """Return the state of the file of the rows as sent, without its lines."""
        try:
            with open_regular(self.source.inputs) as file:
                stat = os.fstat(file.fileno())
        except OSError:
            return FileState()
        return FileState().observe(stat, is_trusted=is_settled(stat))

    def _read_inputs(self, state: FileState) -> tuple[InputIndex, FileState]:
        """Return the rows as sent, and *state* with the lines that are no rows."""

        def add_bad_line(number: int, error: Exception) -> None:
            state.add_bad_line(number, str(error), MAX_NAMED_LINES)

        rows = InputIndex(self.source.inputs, open_file=open_regular, parse=_parse_input, on_error=add_bad_line)
        # Without a file that can be read, no row is known.
        with suppress(OSError):
            rows.read()
        return rows, state


def _create_text_tables(connection: sqlite3.Connection) -> None:
    try:
        for statement in TEXT_SCHEMA.split(";"):
            connection.execute(statement)
    except sqlite3.OperationalError:
        # This SQLite was built without FTS5.
        connection.execute("DROP TABLE IF EXISTS texts_done")


def _parse_input(data: bytes, where: str) -> Row:
    row = jsonl.parse_row(data, where=where)
    _check_depth(data, row)
    return row


def _check_depth(line: bytes, row: Row) -> None:
    """Raise `ValueError` if the object in *line* is nested too deeply."""
    brackets = line.translate(None, _NO_BRACKETS)
    if len(brackets) <= 2 * MAX_LINE_DEPTH or max(accumulate(map(_DEPTHS.__getitem__, brackets))) <= MAX_LINE_DEPTH:
        return
    # The brackets may be those of texts.
    if jsonl.measure_depth(row) > MAX_LINE_DEPTH:
        raise ValueError(f"more than {MAX_LINE_DEPTH} levels are nested")


def _read_at(path: Path, offset: int, length: int) -> bytes:
    with open_regular(path) as file:
        return os.pread(file.fileno(), length, offset)
