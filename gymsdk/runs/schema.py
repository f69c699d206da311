"""The tables of the index of a run, and how rows are written to them."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple

from gymsdk.line import FORMAT, StoredRollout
from gymsdk.runs.file_state import FileState
from gymsdk.runs.notes import RunNotes
from gymsdk.runs.records import Record, iter_texts

VERSION = 9_000 + FORMAT
"""The version of the schema, and the newest format of a line. An index with another version is built again."""

MAX_INTEGER = 2**63 - 1
"""The largest integer that SQLite stores."""

MAX_REAL = 1e100
"""The largest number of a column: with larger ones, means and squares are beyond the range of a double."""

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

_RECORD_COLUMNS = (*COLUMNS, *FAILURE_COLUMNS)

_FACET_PLACES = [_RECORD_COLUMNS.index(name) for name in FACET_COLUMNS]

SORTABLE = (*(name for name in COLUMNS if name not in {"prompt", "flags"}), "failure")
"""The columns with an index."""

KINDS: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("task", "repeat", "turns", "tool_calls", "tokens", "flags"), int),
    **dict.fromkeys(("reward", "seconds", "model_seconds", "started"), (int, float)),
    **dict.fromkeys(("environment", "outcome", "ended", "answer", "prompt", *FAILURE_COLUMNS), str),
}
"""The types of the values of the columns of the table `rollout`."""

TAG, NOTE = "tag", "note"
"""The fields with the tags and the texts of annotations."""

FAILURES, INPUTS = 1, 2
"""The numbers of two files in the table `file`: the second of `RunSource.files`, and that of the rows as sent."""

SCHEMA = """
CREATE TABLE progress (changes INTEGER);
CREATE TABLE file (number INTEGER PRIMARY KEY, identity TEXT, size INTEGER, modified INTEGER, changed INTEGER,
    is_trusted INTEGER, offset INTEGER, lines INTEGER, first TEXT, last TEXT, digest BLOB,
    bad INTEGER, bad_message TEXT, bad_lines TEXT, rollouts INTEGER, scored INTEGER, earned REAL);
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
CREATE TABLE field (name TEXT, text TEXT, rollout INTEGER, number REAL,
    PRIMARY KEY (rollout, name, text)) WITHOUT ROWID;
CREATE TABLE notes (state TEXT);
CREATE INDEX rollout_place ON rollout (file, offset);
CREATE TABLE task (environment TEXT, task INTEGER, digest TEXT, line_digest TEXT,
    PRIMARY KEY (environment, task)) WITHOUT ROWID;
"""

INDEXES = [
    *(f"CREATE INDEX IF NOT EXISTS rollout_{name} ON rollout ({name}, id)" for name in SORTABLE),
    # With the number, so that the kind of a field is found without its rows.
    "CREATE INDEX IF NOT EXISTS field_name ON field (name, text, rollout, number)",
]
"""Created after the first pass over the run, which is faster than to maintain them meanwhile."""

INSERT_TEXT = "INSERT INTO text (rowid, content) VALUES (?, ?)"


def create_tables(connection: sqlite3.Connection) -> None:
    """Replace the tables of an index of another version by empty ones."""
    for (name,) in connection.execute(
        "SELECT name FROM sqlite_master WHERE type = 'table' AND name IN"
        " ('progress', 'file', 'rollout', 'facets', 'figure', 'tool', 'field', 'notes', 'task', 'text', 'texts_done')"
    ).fetchall():
        connection.execute(f"DROP TABLE {name}")
    for statement in SCHEMA.split(";"):
        connection.execute(statement)
    # The time distinguishes the progress of this index from that of an earlier one in the same file.
    connection.execute("INSERT INTO progress VALUES (?)", (time.time_ns() // 1_000_000,))
    connection.execute(f"PRAGMA user_version = {VERSION}")


def has_search(connection: sqlite3.Connection) -> bool:
    """Return whether this SQLite has full-text search, without which texts are searched in the files."""
    return connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'text'").fetchone() is not None


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


def read_state(connection: sqlite3.Connection, number: int) -> FileState | None:
    row = connection.execute("SELECT * FROM file WHERE number = ?", (number,)).fetchone()
    return FileState(*row[1:]) if row else None


def write_state(connection: sqlite3.Connection, number: int, state: FileState) -> None:
    values = (number, *astuple(state))
    connection.execute(f"INSERT OR REPLACE INTO file VALUES ({', '.join('?' * len(values))})", values)  # noqa: S608  # only question marks


def count_change(connection: sqlite3.Connection) -> None:
    """Count a change of the rollouts, by which all processes notice that their caches are outdated."""
    connection.execute("UPDATE progress SET changes = changes + 1")


def update_notes(connection: sqlite3.Connection, notes: RunNotes) -> bool:
    """Copy the annotations into the index as the fields `tag` and `note`; return whether anything changed."""
    [last] = connection.execute("SELECT coalesce(max(id), 0) FROM rollout").fetchone()
    state = f"{last} {notes.describe_state()}"
    if connection.execute("SELECT 1 FROM notes WHERE state = ?", (state,)).fetchone() is not None:
        return False
    with transaction(connection):
        removed = connection.execute("DELETE FROM field WHERE name IN (?, ?)", (TAG, NOTE)).rowcount
        added = 0
        for note in notes.read():
            values = [*((TAG, tag) for tag in note.tags), *([(NOTE, note.text)] if note.text else [])]
            for name, text in values:
                added += connection.execute(
                    "INSERT OR IGNORE INTO field SELECT ?, ?, id, NULL FROM rollout WHERE task = ? AND repeat = ?",
                    (name, _to_sql(text), *map(int, note.id.split(":"))),
                ).rowcount
        connection.execute("DELETE FROM notes")
        connection.execute("INSERT INTO notes VALUES (?)", (state,))
        if removed or added:
            count_change(connection)
    return bool(removed or added)


def are_texts_indexed(connection: sqlite3.Connection) -> bool:
    """Return whether the texts of all indexed rollouts are searchable."""
    if not has_search(connection):
        return False
    [done] = connection.execute("SELECT coalesce(max(id), 0) FROM texts_done").fetchone()
    [last] = connection.execute("SELECT coalesce(max(id), 0) FROM rollout").fetchone()
    return bool(done == last)


def write_texts_done(connection: sqlite3.Connection, last: int) -> None:
    """Store that the texts of the rollouts up to the id *last* are searchable."""
    connection.execute("DELETE FROM texts_done")
    connection.execute("INSERT INTO texts_done VALUES (?)", (last,))


def join_texts(stored: StoredRollout) -> str:
    """Return the texts of a rollout as SQLite stores them: UTF-8 has no unpaired surrogates."""
    return "\n".join(iter_texts(stored)).encode("utf-8", "replace").decode()


def forget(connection: sqlite3.Connection, number: int) -> bool:
    """Remove the rows of a file that was replaced or removed, and return whether there are any.

    The texts of all files are read again.
    """
    if read_state(connection, number) is None:
        return False
    for table in ("figure", "tool", "field"):
        connection.execute(
            f"DELETE FROM {table} WHERE rollout IN (SELECT id FROM rollout WHERE file = ?)",  # noqa: S608  # a constant name
            (number,),
        )
    connection.execute("DELETE FROM rollout WHERE file = ?", (number,))
    connection.execute("DELETE FROM file WHERE number = ?", (number,))
    connection.execute("DELETE FROM task")
    count_change(connection)
    if has_search(connection):
        connection.execute("INSERT INTO text (text) VALUES ('delete-all')")
        connection.execute("DELETE FROM texts_done")
    return True


class Batch:
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
        self._fields: list[tuple[object, ...]] = []
        self._texts: list[tuple[int, str]] = []

    def add(self, record: Record, stored: StoredRollout, place: tuple[int, int, int]) -> None:
        """Add the *record* of a line, which is at *place*: the number of the file, the offset, the length."""
        given = [*(getattr(record, name) for name in COLUMNS), *record.failure]
        values = [_check_value(name, value) for name, value in zip(_RECORD_COLUMNS, given, strict=True)]
        text = join_texts(stored) if self._with_texts else ""
        facets = tuple(values[number] for number in _FACET_PLACES)
        number = self._facets.setdefault(facets, len(self._facets) + 1)
        self._last += 1
        self._rollouts.append((self._last, *place, *values, number, _to_sql(record.digest)))
        self._figures += [(self._last, _to_sql(name), value) for name, value in record.figures.items()]
        self._tools += [(self._last, _to_sql(name), *counts) for name, counts in record.tools.items()]
        self._fields += [(_to_sql(name), _to_sql(text), self._last, number) for name, text, number in record.fields]
        if self._with_texts:
            self._texts.append((self._last, text))

    def write(self) -> None:
        """Write the rows."""
        names = ("id", "file", "offset", "length", *COLUMNS, *FAILURE_COLUMNS, "facets", "digest")
        statement = f"INSERT INTO rollout ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})"  # noqa: S608  # constant names
        self._connection.executemany(statement, self._rollouts)
        facets = [(number, *values) for values, number in self._facets.items()]
        self._connection.executemany("INSERT OR IGNORE INTO facets VALUES (?, ?, ?, ?, ?)", facets)
        self._connection.executemany("INSERT OR REPLACE INTO figure VALUES (?, ?, ?)", self._figures)
        self._connection.executemany("INSERT OR REPLACE INTO tool VALUES (?, ?, ?, ?)", self._tools)
        self._connection.executemany("INSERT OR IGNORE INTO field VALUES (?, ?, ?, ?)", self._fields)
        if self._with_texts:
            self._connection.executemany(INSERT_TEXT, self._texts)
            write_texts_done(self._connection, self._last)


def _check_value(name: str, value: object) -> object:
    """Return the value of a column as SQLite can hold it; raises `ValueError` if it has another type."""
    if value is not None and not isinstance(value, KINDS[name]):
        raise ValueError(f"the value of `{name}` has the type {type(value).__name__}")
    if value is None or isinstance(value, str):
        return _to_sql(value)
    if isinstance(value, int) and abs(value) > MAX_INTEGER:
        raise ValueError(f"the value of `{name}` has more than 64 bits")
    if isinstance(value, float) and abs(value) > MAX_REAL:
        raise ValueError(f"the value of `{name}` is {value:g}, beyond {MAX_REAL:g}")
    return value


def _to_sql(value: object) -> object:
    """Return a value that SQLite can hold: text without unpaired surrogates."""
    if isinstance(value, str) and not value.isascii():
        return value.encode("utf-8", "replace").decode()
    return value
