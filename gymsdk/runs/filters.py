"""Filters of rollouts: the grammar of conditions, the types of the fields, the missing values, and the SQL.

A condition is text, such as `reward<0.5`, or a field, an operator and a value, as in the addresses of the viewer.

The values of a rollout are missing as follows. A number is missing if the index has none. A text is missing if the
index has none, or the empty text. The names of tools are missing if no tool was called, and those of tools with errors
if no output was an error. `=none` finds the rollouts without a value. `!=` is the opposite of `=`: it finds rollouts
without a value too. No other operator does.

An exported page evaluates conditions itself, with the same fields and operators (`studio/static/filters.js`).
"""

from __future__ import annotations

import math
import re
import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from gymsdk import jsonl
from gymsdk.errors import UsageError, format_suggestion
from gymsdk.runs.lenses import LENSES
from gymsdk.runs.records import ROW
from gymsdk.runs.schema import COLUMNS, FAILURE_COLUMNS, KINDS, MAX_INTEGER, NOTE, TAG

Condition: TypeAlias = tuple[str, str, Any]
"""A field, an operator and a value."""

Kind: TypeAlias = Literal["number", "text", "tools", "values", "lens"]
"""The type of the values of a field; `tools` are the names of tools, and `values` any number of texts and numbers."""

Sql: TypeAlias = tuple[str, list[Any]]
"""An expression on the table `rollout r`, and its values."""

FIGURE = "figure:"
"""The prefix of a number of the verdict or a component of the reward as a field, such as `figure:part/format`."""

TEXTS = frozenset(name for name, kind in KINDS.items() if kind is str)

COLUMN_KINDS: dict[str, Kind] = {
    name: "text" if name in TEXTS else "number" for name in ("id", *COLUMNS, *FAILURE_COLUMNS)
}
"""The columns of a rollout, which can be filtered and sorted."""

FIELD_KINDS: dict[str, Kind] = COLUMN_KINDS | {
    "tool": "tools",
    "tool_error": "tools",
    TAG: "values",
    NOTE: "values",
    "lens": "lens",
}

EQUALITY, ORDER = ("=", "!="), ("<", "<=", ">", ">=")

OPERATORS: dict[Kind, tuple[str, ...]] = {
    "number": (*EQUALITY, *ORDER, "in"),
    "text": (*EQUALITY, *ORDER, "in", "contains"),
    "tools": (*EQUALITY, "in", "contains"),
    "values": (*EQUALITY, *ORDER, "in", "contains"),
    "lens": ("=",),
}
"""The operators that a field can have. In text, `contains` is `~`, and there is no `in`."""

SYMBOLS = "= != < <= > >= ~"

MISSING = ("", "none", "null")
"""The values of a condition in text that stand for a missing value."""

LENS_FORM = f"a condition on `lens` is lens=NAME, with one of: {', '.join(LENSES)}"

MAX_VALUES = 1000
"""The largest number of values of one condition."""

MAX_CONDITIONS = 100
"""The largest number of conditions of one filter."""

MAX_SEARCH_CHARS = 1000
"""The longest text that is searched."""

NUMBER = r"[+-]?(?:\d+(?:_\d+)*(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?"
"""A number in text. A decimal comma is an error, because 0,5 might be two numbers."""

# Operators of other languages are found here, so that `answer==7` does not look for the answer `=7`.
_CONDITION = re.compile(
    r"\s*(?P<field>[^=!<>~]*?)\s*(?P<operator>==|=~|!~|~=|<>|!=|<=|>=|=|<|>|~|!|\Z)\s*(?P<value>.*?)\s*", re.DOTALL
)

_NUMBER = re.compile(NUMBER, re.ASCII)


@dataclass(frozen=True)
class Filter:
    """Which rollouts a query is about.

    Attributes:
        where: Conditions that must all hold. A field is a column of the index, `figure:NAME`, `row:NAME` (a field of
            the row), `tag` or `note` (an annotation), `tool` (a tool that was called), `tool_error` (a tool that
            returned an error) or `lens` (a saved filter, see `LENSES`).
        search: A text that must occur in the conversation, ignoring case.
    """

    where: tuple[Condition, ...] = ()
    search: str = ""


class _ConditionError(UsageError):
    """A part of a condition is not valid: its field, its operator or its value."""

    def __init__(self, part: str, message: str) -> None:
        super().__init__(message)
        self.part = part


def parse_condition(text: str) -> Condition:
    """Return the condition in *text*, such as `reward<1`, `tool=get_weather`, `ended!=done` or `prompt~weather`.

    A value `none`, `null` or nothing stands for a missing value, except after `~`. A value in double quotes is the
    text in the quotes, as in JSON.

    Raises:
        UsageError: *text* is not a condition; the message has the position of the error in *text*.
    """
    found = _CONDITION.fullmatch(text)
    assert found is not None, "every text has a field that ends at an operator or at the end"
    field, operator, value = found.groups()
    if not operator:
        advice = f"write FIELD=VALUE, with one of {SYMBOLS}"
        raise UsageError(f"{text[:200]!r} is not a condition; {advice} (at position {found.end() + 1})")
    name = "contains" if operator == "~" else operator
    try:
        return _check_parts(field, name, _read_value(value, can_be_missing=name != "contains"))
    except _ConditionError as error:
        raise UsageError(f"{error} (at position {found.start(error.part) + 1} of {text[:200]!r})") from None


def check_condition(condition: Sequence[Any]) -> Condition:
    """Return *condition* with a value of its field's type.

    Raises:
        UsageError: The field or the operator does not exist, or the value does not fit.
    """
    if not isinstance(condition, list | tuple) or len(condition) != 3:  # noqa: PLR2004 - a condition has three parts
        raise UsageError("a condition is a list of a field, an operator and a value")
    return _check_parts(*condition)


def build_filter(where: Iterable[str | Sequence[Any]] = (), search: str = "") -> Filter:
    """Return a filter of conditions, as text or as a field, an operator and a value.

    Raises:
        UsageError: A condition or the text to search is not valid.
    """
    if isinstance(where, str):
        raise UsageError(f"conditions are a list; write [{where!r}]")
    conditions = tuple(
        parse_condition(one) if isinstance(one, str) else _check_numbered(number, one)
        for number, one in enumerate(where, 1)
    )
    if len(conditions) > MAX_CONDITIONS:
        raise UsageError(f"a filter has {len(conditions):,} conditions; at most {MAX_CONDITIONS} are possible")
    if len(search) > MAX_SEARCH_CHARS:
        raise UsageError(f"the text to search has more than {MAX_SEARCH_CHARS:,} characters")
    return Filter(conditions, check_text(search))


def check_sort_field(field: str) -> str:
    """Return *field* if rollouts can be sorted by it; raises `UsageError` otherwise."""
    if field.startswith(FIGURE):
        return check_text(field)
    if field not in COLUMN_KINDS:
        suggestion = format_suggestion(field, COLUMN_KINDS, f"the fields: {', '.join(sorted(COLUMN_KINDS))}")
        raise UsageError(f"there is no field {field!r} to sort by{suggestion}")
    return field


def build_condition(conditions: Iterable[Condition], connection: sqlite3.Connection) -> Sql:
    """Return the SQL of the checked *conditions*, which must all hold.

    Args:
        conditions: The conditions.
        connection: A connection to the index, prepared by `add_functions`.
    """
    parts, values = ["1"], []
    for field, operator, value in conditions:
        part, used = _build_part(field, operator, value, connection)
        parts.append(f"({part})")
        values += used
    return " AND ".join(parts), values


def build_sort_key(field: str, connection: sqlite3.Connection) -> Sql:
    """Return the SQL of a field to sort by, which is NULL for a missing value; raises `UsageError` if there is none."""
    column, values = _build_column(check_sort_field(field))
    if field in TEXTS:
        [has_empty] = connection.execute(f"SELECT EXISTS (SELECT 1 FROM rollout r WHERE {column} = '')").fetchone()  # noqa: S608  # a constant name
        # An expression is sorted without the column's index.
        return (f"nullif({column}, '')" if has_empty else column), values
    return column, values


def add_functions(connection: sqlite3.Connection) -> None:
    """Add the functions that conditions use to *connection*."""
    # SQLite's LIKE ignores the case of ASCII letters only, and has wildcards.
    connection.create_function(
        "has_part", 2, lambda text, part: text is not None and part in text.lower(), deterministic=True
    )


def describe_grammar() -> dict[str, Any]:
    """Return the fields and operators for an exported page."""
    return {
        "fields": FIELD_KINDS,
        "operators": OPERATORS,
        "symbols": SYMBOLS,
        "missing": MISSING,
        "number": NUMBER,
        "lenses": list(LENSES),
        "max_conditions": MAX_CONDITIONS,
        "max_values": MAX_VALUES,
    }


def is_unicode(text: str) -> bool:
    """Return whether *text* has no unpaired surrogates, which JSON may contain, and SQLite does not store."""
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


def check_text(text: str) -> str:
    """Return *text* if it has no unpaired surrogates.

    Raises:
        UsageError: It has.
    """
    if not is_unicode(text):
        raise UsageError(f"{text[:80]!r} has an unpaired surrogate, which no text of a run contains")
    return text


# Values


def _check_numbered(number: int, condition: Sequence[Any]) -> Condition:
    try:
        return check_condition(condition)
    except UsageError as error:
        raise UsageError(f"condition {number}: {error}") from None


def _read_value(text: str, *, can_be_missing: bool) -> str | None:
    if can_be_missing and text in MISSING:
        return None
    if len(text) > 1 and text[0] == text[-1] == '"':
        try:
            value = jsonl.parse_json(text)
        except ValueError:
            return text
        return value if isinstance(value, str) else text
    return text


def _check_parts(field: object, operator: object, value: object) -> Condition:
    kind = _get_kind(field)
    name = _check_operator(field, kind, operator)
    assert isinstance(field, str), "a field with a kind is text"
    if kind == "lens":
        if not isinstance(value, str) or value not in LENSES:
            raise _ConditionError("value", LENS_FORM)
        return field, name, value
    if name == "in":
        values = value if isinstance(value, list | tuple) else [value]
        if len(values) > MAX_VALUES:
            message = f"a condition on {field!r} has {len(values):,} values; at most {MAX_VALUES:,} are possible"
            raise _ConditionError("value", message)
        return field, name, [_convert_value(field, kind, one) for one in values]
    converted = _convert_value(field, kind, value)
    if converted is None and name not in EQUALITY:
        wanted = "a number" if kind == "number" else "a text"
        raise _ConditionError(
            "value", f"expected {wanted} to compare {field!r} with; only = and != find missing values"
        )
    return field, name, converted


def _check_operator(field: object, kind: Kind, operator: object) -> str:
    if not isinstance(operator, str) or operator not in OPERATORS["text"]:
        names = f"{SYMBOLS}; in a list also in and contains"
        raise _ConditionError("operator", f"there is no operator {operator!r}; the operators: {names}")
    if operator not in OPERATORS[kind]:
        known = ", ".join("~" if name == "contains" else name for name in OPERATORS[kind])
        message = LENS_FORM if kind == "lens" else f"{field!r} has only the operators {known}"
        raise _ConditionError("operator", message)
    return operator


def _get_kind(field: object) -> Kind:
    if isinstance(field, str):
        if check_text(field).startswith(FIGURE) and field != FIGURE:
            return "number"
        if field.startswith(ROW) and field != ROW:
            return "values"
        if field in FIELD_KINDS:
            return FIELD_KINDS[field]
    names = [*sorted(FIELD_KINDS), f"{FIGURE}NAME", f"{ROW}NAME"]
    known = f"the fields: {', '.join(names)}"
    suggestion = format_suggestion(field, names, known) if isinstance(field, str) else f"; {known}"
    raise _ConditionError("field", f"there is no field {field!r}{suggestion}")


def _convert_value(field: str, kind: Kind, value: object) -> int | float | str | None:
    """Return *value* as the type of the field's values, `None` for a missing value."""
    if value is None or value == "":
        return None
    if not isinstance(value, str | int | float) or (isinstance(value, str) and not is_unicode(value)):
        raise _ConditionError(
            "value",
            f"the value of {field!r} must be text or a number of at most 64 bits, or a list of them with the operator"
            " `in`",
        )
    if kind == "number":
        return _convert_number(field, value)
    if isinstance(value, str):
        return value
    # An address that an earlier version wrote has the number 7 for the answer 7. JavaScript writes 7.0 as 7.
    number = int(value) if isinstance(value, float) and value.is_integer() else value
    return jsonl.dump_portable_json(number).decode()


def _convert_number(field: str, value: str | float) -> float | None:
    number = value
    if isinstance(value, str):
        text = value.strip()
        if text in MISSING:
            return None
        if not _NUMBER.fullmatch(text):
            advice = f"; write {text.replace(',', '.')}" if _NUMBER.fullmatch(text.replace(",", ".", 1)) else ""
            wanted = f"the value of {field!r} must be a number such as 0.5, or none"
            raise _ConditionError("value", f"{wanted}, got {value[:80]!r}{advice}")
        try:
            number = float(text) if re.search("[.eE]", text) else int(text)
        except ValueError:
            # Python does not convert the longest integers.
            number = math.inf
    assert not isinstance(number, str), "text was converted"
    if isinstance(number, int) and abs(number) > MAX_INTEGER:
        raise _ConditionError("value", f"the value of {field!r} must be a number of at most 64 bits")
    if not math.isfinite(number):
        raise _ConditionError("value", f"the value of {field!r} must be a finite number")
    return int(number) if isinstance(number, bool) else number


# SQL


def _build_column(field: str) -> Sql:
    if field.startswith(FIGURE):
        name = field.removeprefix(FIGURE)
        return "(SELECT f.value FROM figure f WHERE f.rollout = r.id AND f.name = ?)", [name]
    return f"r.{field}", []


def _build_part(field: str, operator: str, value: Any, connection: sqlite3.Connection) -> Sql:  # noqa: PLR0911  # one for each kind
    """Return the SQL of one condition, which is never NULL where another condition negates it."""
    if field == "lens":
        lens_condition, lens_values = LENSES[value].build(connection)
        return lens_condition, list(lens_values)
    if operator == "!=":
        condition, used = _build_part(field, "=", value, connection)
        # A comparison with NULL is NULL.
        return f"({condition}) IS NOT TRUE", used
    if FIELD_KINDS.get(field) == "tools":
        return _build_tool_part(field, operator, value)
    if _get_kind(field) == "values":
        return _build_values_part(field, operator, value)
    column, used = _build_column(field)
    missing = f"({column} IS NULL OR {column} = '')" if field in TEXTS else f"{column} IS NULL"
    missing_values = used * missing.count(column)
    if operator == "in":
        return _build_in(column, used, value, (missing, missing_values))
    if value is None:
        return missing, missing_values
    condition, values = _compare(column, operator, value)
    # The empty text is less than any other.
    is_guarded = field in TEXTS and operator in {"<", "<="}
    return (f"{column} <> '' AND {condition}" if is_guarded else condition), [*used, *values]


def _build_tool_part(field: str, operator: str, value: Any) -> Sql:
    errors = " AND t.errors > 0" if field == "tool_error" else ""
    called = f"EXISTS (SELECT 1 FROM tool t WHERE t.rollout = r.id{errors}"  # noqa: S608  # a constant
    missing: Sql = f"NOT {called})", []
    if operator == "in":
        condition, values = _build_in("t.name", [], [one for one in value if one is not None], missing)
        found = f"{called} AND {condition})"
        return (f"{found} OR {missing[0]}" if None in value else found), values
    if value is None:
        return missing
    condition, values = _compare("t.name", operator, value)
    return f"{called} AND {condition})", values


def _build_values_part(field: str, operator: str, value: Any) -> Sql:
    if operator == "in":
        parts = [_build_values_part(field, "=", one) for one in value]
        return " OR ".join(part for part, _ in parts) or "0", [one for _, used in parts for one in used]
    has_value = "EXISTS (SELECT 1 FROM field f WHERE f.rollout = r.id AND f.name = ?"
    if value is None:
        return f"NOT {has_value})", [field]
    number = float(value) if _NUMBER.fullmatch(value) else None
    if operator == "contains" or number is None:
        condition, values = _compare("f.text", operator, value)
        # A number has no order with a text.
        return f"{has_value} AND {condition}{' AND f.number IS NULL' if operator in ORDER else ''})", [field, *values]
    if operator == "=":
        return f"{has_value} AND (f.text = ? OR f.number = ?))", [field, value, number]
    return f"{has_value} AND f.number {operator} ?)", [field, number]


def _build_in(column: str, used: list[Any], values: Sequence[Any], missing: Sql) -> Sql:
    known = [value for value in values if value is not None]
    condition = f"{column} IN ({', '.join('?' * len(known))})"
    if len(known) == len(values):
        return condition, [*used, *known]
    return f"{condition} OR {missing[0]}", [*used, *known, *missing[1]]


def _compare(column: str, operator: str, value: Any) -> Sql:
    if operator == "contains":
        return f"has_part({column}, ?)", [value.lower()]
    return f"{column} {operator} ?", [value]
