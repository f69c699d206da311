"""Index the rollouts of a run in a SQLite file, so that a viewer lists, sorts, filters and searches them quickly.

The index lies in the user's cache folder and can be deleted at any time: the run's folder may be read-only, and its
lock is never taken. Lines are read where they are in the run's files, by offset and length.

Two passes fill the index. The first reads the values of each rollout (`gymsdk.runs.records`); the second reads the
texts for the search. Both continue where they stopped, also while the run appends lines.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import IO

import orjson

from gymsdk import jsonl
from gymsdk.errors import GymsdkError
from gymsdk.lines import compute_line_digest, compute_task_digest
from gymsdk.metrics import TASK_INDEX
from gymsdk.runs.records import Record, iter_texts, parse_record
from gymsdk.runs.source import RunSource
from gymsdk.types import Row

VERSION = 5
"""The version of the schema. An index with another version is built again."""

BLOCK_BYTES = 4096
"""The size of the first and of the last part of an indexed file that must be unchanged for the index to continue."""

COMMIT_SECONDS = 0.5
"""How long a pass reads before it makes its rows visible to readers."""

LOCK_SECONDS = 30.0
"""Seconds that a process waits for another process that writes to the same index."""

COLUMNS = (
    "environment",
    "task",
    "repeat",
    "reward",
    "outcome",
    "ended",
    "turns",
    "tool_calls",
    "tokens",
    "seconds",
    "model_seconds",
    "started",
    "answer",
    "prompt",
    "flags",
)
"""The attributes of a record that are columns of the table `rollout` under the same name."""

FACET_COLUMNS = ("environment", "outcome", "ended", "failure")
"""The table `facets` numbers the combinations of these columns: a number is counted faster than four texts."""

FAILURE_COLUMNS = ("failure", "stage", "message")

_FACET_PLACES = [(*COLUMNS, *FAILURE_COLUMNS).index(name) for name in FACET_COLUMNS]

SORTABLE = (*(name for name in COLUMNS if name not in {"prompt", "flags"}), "failure")
"""The columns with an index."""

SCHEMA = """
CREATE TABLE file (number INTEGER PRIMARY KEY, inode INTEGER, offset INTEGER, lines INTEGER, first TEXT, last TEXT,
    bad INTEGER, bad_message TEXT, rollouts INTEGER, scored INTEGER, earned REAL);
CREATE TABLE rollout (id INTEGER PRIMARY KEY, file INTEGER, offset INTEGER, length INTEGER,
    environment TEXT, task INTEGER, repeat INTEGER, reward REAL, outcome TEXT, ended TEXT, turns INTEGER,
    tool_calls INTEGER, tokens INTEGER, seconds REAL, model_seconds REAL, started REAL, answer TEXT, prompt TEXT,
    flags INTEGER, failure TEXT, stage TEXT, message TEXT, facets INTEGER, digest TEXT);
CREATE TABLE facets (id INTEGER PRIMARY KEY, environment TEXT, outcome TEXT, ended TEXT, failure TEXT);
CREATE TABLE figure (rollout INTEGER, name TEXT, value REAL, PRIMARY KEY (name, value, rollout)) WITHOUT ROWID;
CREATE INDEX figure_rollout ON figure (rollout);
CREATE TABLE tool (rollout INTEGER, name TEXT, calls INTEGER, errors INTEGER,
    PRIMARY KEY (name, rollout)) WITHOUT ROWID;
CREATE INDEX tool_rollout ON tool (rollout);
CREATE INDEX rollout_place ON rollout (file, offset);
CREATE TABLE task (environment TEXT, task INTEGER, digest TEXT, line_digest TEXT,
    PRIMARY KEY (environment, task)) WITHOUT ROWID;
"""

INDEXES = [f"CREATE INDEX IF NOT EXISTS rollout_{name} ON rollout ({name}, id)" for name in SORTABLE]
"""Created after the first pass over the run, which is faster than to maintain them meanwhile."""

TEXT_SCHEMA = """
CREATE VIRTUAL TABLE text USING fts5 (content, content='', detail=none, columnsize=0, tokenize='unicode61');
CREATE TABLE texts_done (id INTEGER);
"""

INSERT_TEXT = "INSERT INTO text (rowid, content) VALUES (?, ?)"


@dataclass(frozen=True, slots=True)
class FileState:
    """How far a file of the run is indexed.

    Attributes:
        inode: The inode of the file.
        offset: The end of the last indexed line.
        lines: The number of indexed lines.
        first: A digest of the first `BLOCK_BYTES` of the indexed part.
        last: A digest of the last `BLOCK_BYTES` of the indexed part.
        bad: The number of lines that are not rollouts.
        bad_message: Why the first of them is not.
        rollouts: The number of rollouts.
        scored: The number of rollouts with a reward.
        earned: The sum of their rewards.
    """

    inode: int
    offset: int = 0
    lines: int = 0
    first: str = ""
    last: str = ""
    bad: int = 0
    bad_message: str = ""
    rollouts: int = 0
    scored: int = 0
    earned: float = 0.0


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
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._prepare()
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
        """Index the new lines of the run's files; return whether anything changed."""
        with closing(self.connect()) as connection:
            changed = [self._update_file(connection, number) for number in range(len(self.source.files))]
            for statement in INDEXES if any(changed) else ():
                connection.execute(statement)
        return any(changed)

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
            found = connection.execute(
                "SELECT environment, task, max(digest) FROM rollout r WHERE NOT EXISTS (SELECT 1 FROM task t"
                " WHERE t.environment = r.environment AND t.task = r.task) GROUP BY environment, task"
            ).fetchall()
            if not found:
                return
            rows = self._read_inputs({task for _, task, digest in found if digest is None})
            with _transaction(connection):
                for environment, task, stored in found:
                    row = rows.get(task) if stored is None else None
                    digest = stored if row is None else compute_task_digest(row, environment)
                    connection.execute(
                        "INSERT OR REPLACE INTO task VALUES (?, ?, ?, NULL)", (environment, task, digest)
                    )

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
            with _transaction(connection):
                for environment, task, rollout in unknown:
                    digest = compute_line_digest(self.read_line(connection, rollout), environment)
                    connection.execute(
                        "UPDATE task SET line_digest = ? WHERE environment = ? AND task = ?",
                        (digest, environment, task),
                    )

    def read_line(self, connection: sqlite3.Connection, rollout: int) -> Row:
        """Return the stored line of the rollout with this id; raises `GymsdkError` if the file has changed."""
        return jsonl.parse_row(self.read_bytes(connection, rollout), where=str(self.source.path))

    def read_bytes(self, connection: sqlite3.Connection, rollout: int) -> bytes:
        """Return the bytes of the stored line of the rollout with this id."""
        found = connection.execute("SELECT file, offset, length FROM rollout WHERE id = ?", (rollout,)).fetchone()
        if found is None:
            raise GymsdkError(f"{self.source.path} has no rollout with the id {rollout} any more; reload")
        number, offset, length = found
        with self.open_file(number) as file:
            return os.pread(file.fileno(), length, offset)

    def open_file(self, number: int) -> IO[bytes]:
        """Return a file of the run, opened for reading; raises `GymsdkError` if it cannot be read."""
        try:
            return self.source.files[number].open("rb", buffering=0)
        except OSError as error:
            raise GymsdkError(f"{self.source.files[number]}: {error.strerror}") from error

    def _prepare(self) -> None:
        with closing(self.connect()) as connection:
            [version] = connection.execute("PRAGMA user_version").fetchone()
            if version == VERSION:
                return
            with _transaction(connection):
                # Another process may have created the schema meanwhile.
                [version] = connection.execute("PRAGMA user_version").fetchone()
                if version == VERSION:
                    return
                for (name,) in connection.execute(
                    "SELECT name FROM sqlite_master WHERE type = 'table' AND name IN"
                    " ('file', 'rollout', 'facets', 'figure', 'tool', 'task', 'text', 'texts_done')"
                ).fetchall():
                    connection.execute(f"DROP TABLE {name}")
                for statement in SCHEMA.split(";"):
                    connection.execute(statement)
                _create_text_tables(connection)
                connection.execute(f"PRAGMA user_version = {VERSION}")

    def _update_file(self, connection: sqlite3.Connection, number: int) -> bool:
        """Index the new lines of a file; return whether anything changed."""
        changed = False
        while self._index_part(connection, number):
            changed = True
        return changed

    def _index_part(self, connection: sqlite3.Connection, number: int) -> bool:
        """Index new lines of a file for a short time; return whether anything changed.

        The state is read inside the transaction, because another process may index the same run.
        """
        try:
            file = self.source.files[number].open("rb")
        except OSError:
            with _transaction(connection):
                return _forget(connection, number)
        with file:
            stat = os.fstat(file.fileno())
            state = _read_state(connection, number)
            if state and (state.inode, state.offset) == (stat.st_ino, stat.st_size):
                return False
            with _transaction(connection):
                state = _read_state(connection, number)
                forgotten = False
                if state is None or not _continues(file, state, stat):
                    forgotten = _forget(connection, number)
                    state = FileState(stat.st_ino)
                return self._index_lines(connection, file, number, state) or forgotten

    def _index_lines(self, connection: sqlite3.Connection, file: IO[bytes], number: int, state: FileState) -> bool:
        """Index complete lines after the state's offset for a short time; return whether there are any."""
        until = time.monotonic() + COMMIT_SECONDS
        started = state.offset
        # A viewer that follows a run parses each new line once for both passes.
        batch = _Batch(connection, with_texts=started > 0 and _are_texts_indexed(connection))
        file.seek(started)
        for line in file:
            if not line.endswith(b"\n"):
                # The run is writing this line.
                break
            state = self._index_line(batch, line, number, state)
            if time.monotonic() > until:
                break
        if state.offset == started:
            return False
        batch.write()
        values = astuple(_sign(file.fileno(), state))
        connection.execute(
            f"INSERT OR REPLACE INTO file VALUES (?{', ?' * len(values)})",  # noqa: S608  # only question marks
            (number, *values),
        )
        return True

    def _index_line(self, batch: _Batch, line: bytes, number: int, state: FileState) -> FileState:
        """Add the record of *line* to *batch*, and return the state after it."""
        after = replace(state, offset=state.offset + len(line), lines=state.lines + 1)
        if not line.strip():
            return after
        try:
            row = parse_line(line, where=f"{self.source.files[number]}:{after.lines}")
            record = parse_record(row, number=state.lines, failed=number == 1)
        except (GymsdkError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            # Another program may have written anything into the file; the viewer says how many lines it cannot read.
            return replace(after, bad=state.bad + 1, bad_message=state.bad_message or str(error))
        batch.add(record, row, (number, state.offset, len(line)))
        has_reward = record.reward is not None
        return replace(
            after,
            rollouts=state.rollouts + 1,
            scored=state.scored + has_reward,
            earned=state.earned + (record.reward or 0.0),
        )

    def _index_texts(self, connection: sqlite3.Connection) -> bool:
        """Make some rollouts searchable; return whether there were any."""
        until = time.monotonic() + COMMIT_SECONDS
        with _transaction(connection):
            [last] = connection.execute("SELECT coalesce(max(id), 0) FROM texts_done").fetchone()
            waiting = connection.execute(
                "SELECT id, file, offset, length FROM rollout WHERE id > ? ORDER BY id LIMIT 1000", (last,)
            ).fetchall()
            for rollout, number, offset, length in waiting:
                line = _read_at(self.source.files[number], offset, length)
                try:
                    content = _join_texts(parse_line(line, where=""))
                except GymsdkError:
                    # The file is being replaced; the first pass will notice.
                    content = ""
                connection.execute(INSERT_TEXT, (rollout, content))
                last = rollout
                if time.monotonic() > until:
                    break
            _write_texts_done(connection, last)
        return bool(waiting)

    def _read_inputs(self, tasks: set[int]) -> dict[int, Row]:
        """Return the rows as sent of *tasks*, by the index of the task."""
        rows: dict[int, Row] = {}
        if tasks and self.source.inputs.exists():
            for _, row in jsonl.read_rows(self.source.inputs):
                task = row.get(TASK_INDEX)
                if task in tasks:
                    rows.setdefault(task, row)
        return rows


def get_default_path(source: RunSource) -> Path:
    """Return the path of the run's index in the user's cache folder."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gymsdk" / "runs"
    digest = hashlib.blake2b(os.fsencode(source.path.resolve()), digest_size=8).hexdigest()
    return cache / f"{source.name[:80]}-{digest}.sqlite"


def has_search(connection: sqlite3.Connection) -> bool:
    """Return whether this SQLite has full-text search, without which texts are searched in the files."""
    return connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'text'").fetchone() is not None


def _create_text_tables(connection: sqlite3.Connection) -> None:
    try:
        for statement in TEXT_SCHEMA.split(";"):
            connection.execute(statement)
    except sqlite3.OperationalError:
        # This SQLite was built without FTS5.
        connection.execute("DROP TABLE IF EXISTS texts_done")


@contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


def _continues(file: IO[bytes], state: FileState, stat: os.stat_result) -> bool:
    """Return whether the indexed part of *file* is unchanged."""
    if state.inode != stat.st_ino or stat.st_size < state.offset:
        return False
    return _sign(file.fileno(), state) == state


def _sign(descriptor: int, state: FileState) -> FileState:
    """Return *state* with the digests of the file's first and last indexed block."""
    size = min(BLOCK_BYTES, state.offset)
    first, last = os.pread(descriptor, size, 0), os.pread(descriptor, size, state.offset - size)
    return replace(state, first=_digest(first), last=_digest(last))


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def parse_line(line: bytes, *, where: str) -> Row:
    """Return the JSON object in *line*; integers beyond 64 bits become floats, which suffices for an index.

    Args:
        line: The line.
        where: The file and the line's number, for the error.

    Raises:
        GymsdkError: The line is not a JSON object.
    """
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError:
        row = None
    return row if isinstance(row, dict) else jsonl.parse_row(line, where=where)


def _read_at(path: Path, offset: int, length: int) -> bytes:
    with path.open("rb") as file:
        return os.pread(file.fileno(), length, offset)


def _read_state(connection: sqlite3.Connection, number: int) -> FileState | None:
    row = connection.execute("SELECT * FROM file WHERE number = ?", (number,)).fetchone()
    return FileState(*row[1:]) if row else None


def _are_texts_indexed(connection: sqlite3.Connection) -> bool:
    """Return whether the texts of all indexed rollouts are searchable."""
    if not has_search(connection):
        return False
    [done] = connection.execute("SELECT coalesce(max(id), 0) FROM texts_done").fetchone()
    [last] = connection.execute("SELECT coalesce(max(id), 0) FROM rollout").fetchone()
    return bool(done == last)


def _write_texts_done(connection: sqlite3.Connection, last: int) -> None:
    """Store that the texts of the rollouts up to the id *last* are searchable."""
    connection.execute("DELETE FROM texts_done")
    connection.execute("INSERT INTO texts_done VALUES (?)", (last,))


def _join_texts(row: Row) -> str:
    """Return the texts of a rollout as SQLite stores them: UTF-8 has no unpaired surrogates."""
    return "\n".join(iter_texts(row)).encode("utf-8", "replace").decode()


def _forget(connection: sqlite3.Connection, number: int) -> bool:
    """Remove the rows of a file that was replaced or removed, and return whether there are any.

    The texts of all files are read again.
    """
    if _read_state(connection, number) is None:
        return False
    for table in ("figure", "tool"):
        connection.execute(
            f"DELETE FROM {table} WHERE rollout IN (SELECT id FROM rollout WHERE file = ?)",  # noqa: S608  # a constant name
            (number,),
        )
    connection.execute("DELETE FROM rollout WHERE file = ?", (number,))
    connection.execute("DELETE FROM file WHERE number = ?", (number,))
    connection.execute("DELETE FROM task")
    if has_search(connection):
        connection.execute("DROP TABLE text")
        connection.execute("DROP TABLE texts_done")
        _create_text_tables(connection)
    return True


class _Batch:
    """Rows that are written together.

    Args:
        connection: The connection to the index.
        with_texts: Whether the texts are written too, instead of by the second pass.
    """

    def __init__(self, connection: sqlite3.Connection, *, with_texts: bool) -> None:
        self._connection = connection
        self._with_texts = with_texts
        [self._last] = connection.execute("SELECT coalesce(max(id), 0) FROM rollout").fetchone()
        self._facets = {tuple(values): number for number, *values in connection.execute("SELECT * FROM facets")}
        self._rollouts: list[tuple[object, ...]] = []
        self._figures: list[tuple[object, ...]] = []
        self._tools: list[tuple[object, ...]] = []
        self._texts: list[tuple[int, str]] = []

    def add(self, record: Record, row: Row, place: tuple[int, int, int]) -> None:
        """Add the *record* of the line *row*, which is at *place*: the number of the file, the offset, the length."""
        self._last += 1
        values = [_to_sql(value) for value in (*(getattr(record, name) for name in COLUMNS), *record.failure)]
        facets = tuple(values[number] for number in _FACET_PLACES)
        number = self._facets.setdefault(facets, len(self._facets) + 1)
        self._rollouts.append((self._last, *place, *values, number, record.digest))
        self._figures += [(self._last, _to_sql(name), value) for name, value in record.figures.items()]
        self._tools += [(self._last, _to_sql(name), *counts) for name, counts in record.tools.items()]
        if self._with_texts:
            self._texts.append((self._last, _join_texts(row)))

    def write(self) -> None:
        """Write the rows."""
        names = ("id", "file", "offset", "length", *COLUMNS, *FAILURE_COLUMNS, "facets", "digest")
        statement = f"INSERT INTO rollout ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})"  # noqa: S608  # constant names
        self._connection.executemany(statement, self._rollouts)
        facets = [(number, *values) for values, number in self._facets.items()]
        self._connection.executemany("INSERT OR IGNORE INTO facets VALUES (?, ?, ?, ?, ?)", facets)
        self._connection.executemany("INSERT OR REPLACE INTO figure VALUES (?, ?, ?)", self._figures)
        self._connection.executemany("INSERT OR REPLACE INTO tool VALUES (?, ?, ?, ?)", self._tools)
        if self._with_texts:
            self._connection.executemany(INSERT_TEXT, self._texts)
            _write_texts_done(self._connection, self._last)


def _to_sql(value: object) -> object:
    """Return a value that SQLite can hold: text without unpaired surrogates."""
    if isinstance(value, str) and not value.isascii():
        return value.encode("utf-8", "replace").decode()
    return value
