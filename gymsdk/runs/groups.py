"""Group the rollouts of a run by a column, a tool, a field of the row or an annotation."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from gymsdk.errors import UsageError, format_suggestion
from gymsdk.runs.filters import COLUMN_KINDS, FIELD_KINDS
from gymsdk.runs.records import ROW

Condition: TypeAlias = tuple[str, Sequence[Any]]
"""A condition in SQL on the table `rollout r`, and its values."""

MAX_GROUPS = 1000
"""The largest number of groups."""

MAX_COUNTED_VALUES = 50
"""The number of values up to which the values of a field are counted beside a list of rollouts."""

GROUPED = (*(name for name in COLUMN_KINDS if name != "id"), "tool", "tag", "note")
"""The fields to group by, beside those of the row."""


def list_fields(connection: sqlite3.Connection) -> list[str]:
    """Return the names of the fields of the rows and of the annotations that a run has."""
    # A recursive step per name is faster than to read every row of the table.
    rows = connection.execute(
        "WITH RECURSIVE names(name) AS (SELECT min(name) FROM field UNION ALL"
        " SELECT (SELECT min(name) FROM field WHERE name > names.name) FROM names WHERE name IS NOT NULL)"
        " SELECT name FROM names WHERE name IS NOT NULL"
    )
    return [name for (name,) in rows]


def describe_fields(connection: sqlite3.Connection) -> dict[str, str]:
    """Return the kind of each of these fields: `number`, `text`, or `list` if a rollout has several values."""
    rows = connection.execute(
        "SELECT name, max(number), min(number) FROM (SELECT name, count(*) AS number, 0 AS other FROM field"
        " GROUP BY name, rollout) GROUP BY name"
    )
    most = {name: largest for name, largest, _ in rows}
    texts = {name for name in most if _has_text(connection, name)}
    kinds = {name: "list" if most[name] > 1 else "text" if name in texts else "number" for name in most}
    return kinds | ({"tag": "list"} if "tag" in kinds else {})


def _has_text(connection: sqlite3.Connection, name: str) -> bool:
    statement = "SELECT 1 FROM field WHERE name = ? AND number IS NULL LIMIT 1"
    return connection.execute(statement, (name,)).fetchone() is not None


def get_fields(connection: sqlite3.Connection, rollout: int) -> dict[str, list[tuple[str, float | None]]]:
    """Return the fields of a rollout's row and of its annotations: each value as text, and as a number if it is one."""
    found: dict[str, list[tuple[str, float | None]]] = {}
    statement = "SELECT name, text, number FROM field WHERE rollout = ? ORDER BY name, text"
    for name, text, number in connection.execute(statement, (rollout,)):
        found.setdefault(name, []).append((text, number))
    return found


def group(connection: sqlite3.Connection, by: str, condition: Condition) -> list[dict[str, Any]]:
    """Return each value of the field *by* with the number of its rollouts and tasks and their mean reward.

    A rollout with several values is in several groups; the value of rollouts without one is `None`.

    Args:
        connection: A connection to the index.
        by: The field.
        condition: Which rollouts.

    Raises:
        UsageError: The run has no such field.
    """
    value, join, used = _build_join(connection, by)
    number = "f.number" if value == "f.text" else "NULL"
    rows = connection.execute(
        f"SELECT {value} AS value, count(*) AS rollouts, count(r.reward) AS scored, avg(r.reward) AS mean,"  # noqa: S608  # constant names
        f" count(DISTINCT r.environment || ' ' || r.task) AS tasks FROM rollout r {join} WHERE {condition[0]}"
        f" GROUP BY 1 ORDER BY {value} IS NULL, max({number}) NULLS LAST, 2 DESC, 1 LIMIT {MAX_GROUPS}",
        (*used, *condition[1]),
    )
    return [dict(row) for row in rows]


def count_values(connection: sqlite3.Connection, condition: Condition) -> list[dict[str, Any]]:
    """Return the fields with few values, each with the numbers and mean rewards of the rollouts of each value."""
    counted = []
    for name in list_fields(connection):
        if name == "note" or len(_list_first_values(connection, name)) > MAX_COUNTED_VALUES:
            continue
        groups = group(connection, name, (f"f.rollout IS NOT NULL AND ({condition[0]})", condition[1]))
        values = [
            {"value": counted_value["value"], "count": counted_value["rollouts"], "mean": counted_value["mean"]}
            for counted_value in groups
        ]
        if values:
            counted.append({"name": name, "values": values})
    return counted


def list_task_values(connection: sqlite3.Connection, by: str) -> Mapping[tuple[str, int], list[str]]:
    """Return the values of the field *by* of each task; raises `UsageError` if the run has no such field."""
    value, join, used = _build_join(connection, by)
    found: dict[tuple[str, int], list[str]] = {}
    for environment, task, text in connection.execute(
        f"SELECT DISTINCT r.environment, r.task, {value} FROM rollout r {join} WHERE {value} IS NOT NULL ORDER BY 3",  # noqa: S608
        used,
    ):
        found.setdefault((environment, task), []).append(str(text))
    return found


def _list_first_values(connection: sqlite3.Connection, name: str) -> list[str]:
    """Return at most one value more than are counted."""
    rows = connection.execute(
        "WITH RECURSIVE texts(text) AS (SELECT min(text) FROM field WHERE name = :name"
        " UNION ALL SELECT (SELECT min(text) FROM field WHERE name = :name AND text > texts.text)"
        " FROM texts WHERE text IS NOT NULL)"
        " SELECT text FROM texts WHERE text IS NOT NULL LIMIT :limit",
        {"name": name, "limit": MAX_COUNTED_VALUES + 1},
    )
    return [text for (text,) in rows]


def _build_join(connection: sqlite3.Connection, by: str) -> tuple[str, str, list[Any]]:
    """Return the SQL of the field's value, a join of the table with it, and the values of the join."""
    if by in COLUMN_KINDS and by != "id":
        return (f"nullif(r.{by}, '')" if COLUMN_KINDS[by] == "text" else f"r.{by}"), "", []
    if by == "tool":
        return "f.name", "LEFT JOIN tool f ON f.rollout = r.id", []
    known = list_fields(connection)
    if by in known or FIELD_KINDS.get(by) == "values":
        return "f.text", "LEFT JOIN field f ON f.rollout = r.id AND f.name = ?", [by]
    # The fields tag and note are known too if a rollout has one.
    names = [*GROUPED, *(name for name in known if name.startswith(ROW))]
    hint = format_suggestion(by, names, f"the fields: {', '.join(names)}")
    raise UsageError(f"there is no field {by!r} to group by{hint}")
