"""Query the index of a run: lists of rollouts, counts, groups, tools, failures, and the search of texts."""

from __future__ import annotations

import math
import mmap
import os
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean, pstdev
from typing import Any

from gymsdk import jsonl
from gymsdk.errors import GymsdkError, UsageError
from gymsdk.runs.index import RunIndex, parse_line
from gymsdk.runs.lenses import LENSES, LengthComponent, find_length_components
from gymsdk.runs.records import iter_texts
from gymsdk.runs.schema import COLUMNS, FACET_COLUMNS, FAILURE_COLUMNS, INPUTS, has_search
from gymsdk.runs.source import open_regular

Condition = tuple[str, str, Any]
"""A field, an operator and a value."""

Place = tuple[int, int, int, int]
"""The id of a rollout, the number of its file, and the offset and the length of its line."""

OPERATORS = {"=": "=", "!=": "IS NOT", "<": "<", "<=": "<=", ">": ">", ">=": ">=", "in": "IN", "contains": "LIKE"}

FIELDS = frozenset({*COLUMNS, *FAILURE_COLUMNS, "id"})
"""The columns of a rollout that can be filtered and sorted."""

FIGURE = "figure:"
"""The prefix of a number of the verdict or a component of the reward as a field, such as `figure:part/format`."""

MAX_ROWS = 1000
"""The largest number of rollouts of one list."""

MAX_HITS = 10_000
"""The largest number of rollouts that a search finds."""

MAX_PHRASE_HITS = 1000
"""The largest number of rollouts that a search finds for several words, which it verifies in the stored lines."""

MAX_KEPT_SEARCHES = 16
"""The number of search results that are kept until the run grows."""

HISTOGRAM_BINS = 20

MAX_FACET_VALUES = 50
"""The number of values of a facet that are listed."""

MAX_VALUES = 1000
"""The largest number of values of one condition."""

MAX_CONDITIONS = 100
"""The largest number of conditions of one filter."""

MAX_SEARCH_CHARS = 1000
"""The longest text that is searched."""

UNFINISHED_SECONDS = 10.0
"""How long a file has not been modified when a last line without an end counts as a line that cannot be read."""

MAX_SQLITE_INTEGER = 2**63 - 1

_ROLLOUT_NAME = re.compile(r"#(?P<id>\d{1,18})|(?P<task>\d{1,18})(:(?P<repeat>\d{1,18})?)?")

_CONDITION = re.compile(r"\s*([\w:/.-]+?)\s*(!=|<=|>=|=|<|>|~)\s*(.*?)\s*", re.DOTALL)


@dataclass(frozen=True)
class Filter:
    """Which rollouts a query is about.

    Attributes:
        where: Conditions that must all hold. A field is a column of the index, `figure:NAME`, `tool` (a tool that was
            called), `tool_error` (a tool whose output was an error) or `lens` (a saved filter, see `LENSES`).
        search: A text that must occur in the conversation, ignoring case.
    """

    where: tuple[Condition, ...] = ()
    search: str = ""


def parse_condition(text: str) -> Condition:
    """Return the condition in *text*, such as `reward<1`, `tool=get_weather`, `ended!=done` or `prompt~weather`.

    Raises:
        UsageError: *text* is not a condition.
    """
    found = _CONDITION.fullmatch(text)
    if found is None:
        raise UsageError(f"{text!r} is not a condition; write FIELD=VALUE, with one of = != < <= > >= ~")
    field, operator, value = found.groups()
    return check_condition((field, "contains" if operator == "~" else operator, _parse_value(value)))


def check_condition(condition: Sequence[Any]) -> Condition:
    """Return *condition* if its field and its operator exist, and its value fits; raises `UsageError` otherwise."""
    if len(condition) != 3:  # noqa: PLR2004 - a condition has three parts
        raise UsageError("a condition is a list of a field, an operator and a value")
    field, operator, value = condition
    if not isinstance(field, str) or not (
        field in FIELDS or field in {"tool", "tool_error", "lens"} or field.startswith(FIGURE)
    ):
        names = ", ".join(sorted({*FIELDS, "tool", "tool_error", "lens"}))
        raise UsageError(f"there is no field {field!r}; the fields: {names}, {FIGURE}NAME")
    if not isinstance(operator, str) or operator not in OPERATORS:
        raise UsageError(f"there is no operator {operator!r}; the operators: {', '.join(OPERATORS)}")
    if field == "lens" and (operator != "=" or not isinstance(value, str) or value not in LENSES):
        raise UsageError(f"a condition on `lens` is lens=NAME, with one of: {', '.join(LENSES)}")
    values = value if operator == "in" and isinstance(value, list) else [value]
    if len(values) > MAX_VALUES:
        raise UsageError(f"a condition on {field!r} has {len(values):,} values; at most {MAX_VALUES:,} are possible")
    if not all(map(_is_value, values)):
        raise UsageError(
            f"the value of {field!r} must be text or a number of at most 64 bits, or a list of them with the operator"
            " `in`"
        )
    check_text(field)
    return field, operator, value


def _is_value(value: object) -> bool:
    """Return whether SQLite can compare a column with the value."""
    if isinstance(value, int):
        return abs(value) <= MAX_SQLITE_INTEGER
    return value is None or isinstance(value, float) or (isinstance(value, str) and is_unicode(value))


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


class RunQueries:
    """Answers questions about one run from its index.

    Args:
        index: The index. It is read as it is; `RunIndex.update` brings it up to date.
    """

    def __init__(self, index: RunIndex) -> None:
        self.index = index
        self._connection = index.connect()
        self._inode = index.path.stat().st_ino
        self._searches: dict[str, tuple[tuple[int, int], list[int]]] = {}

    @property
    def is_current(self) -> bool:
        """Whether the file of the index is still the one that this object has opened."""
        try:
            return self.index.path.stat().st_ino == self._inode
        except OSError:
            return False

    def get_progress(self) -> tuple[int, int]:
        """Return numbers that grow with the rollouts and with the indexed texts, whichever process indexes them."""
        [changes] = self._connection.execute("SELECT changes FROM progress").fetchone()
        return changes, self._count_indexed()[0]

    def close(self) -> None:
        """Close the connection to the index."""
        self._connection.close()

    def list_rows(
        self,
        chosen: Filter | None = None,
        *,
        sort: str = "id",
        descending: bool = False,
        offset: int = 0,
        limit: int = 100,
    ) -> list[dict[str, Any]]:
        """Return rollouts with the columns of the index.

        Args:
            chosen: Which rollouts.
            sort: The field to sort by; rollouts without a value come last.
            descending: Whether the largest value comes first.
            offset: The number of rollouts to skip.
            limit: The most rollouts to return, at most `MAX_ROWS`.

        Raises:
            UsageError: A field does not exist.
        """
        condition, values = self._build_condition(chosen or Filter())
        key, key_values = self._build_sort_key(sort)
        direction = "DESC" if descending else "ASC"
        names = ", ".join(f"r.{name}" for name in ("id", *COLUMNS, *FAILURE_COLUMNS))
        rows = self._connection.execute(
            f"SELECT {names} FROM rollout r WHERE {condition}"  # noqa: S608  # names from FIELDS, values as parameters
            f" ORDER BY {key} {direction} NULLS LAST, r.id {direction} LIMIT ? OFFSET ?",
            (*values, *key_values, min(limit, MAX_ROWS), offset),
        )
        return [dict(row) for row in rows]

    def count(self, chosen: Filter | None = None) -> int:
        """Return the number of rollouts."""
        condition, values = self._build_condition(chosen or Filter())
        [number] = self._connection.execute(f"SELECT count(*) FROM rollout r WHERE {condition}", values).fetchone()  # noqa: S608
        return int(number)

    def list_ids(self, chosen: Filter) -> list[int]:
        """Return the ids of rollouts, in the order of the lines."""
        condition, values = self._build_condition(chosen)
        rows = self._connection.execute(f"SELECT id FROM rollout r WHERE {condition} ORDER BY id", values)  # noqa: S608
        return [rollout for (rollout,) in rows]

    def count_rewards(self) -> tuple[int, int, float | None]:
        """Return the number of rollouts, the number of those with a reward, and their mean, quickly."""
        rollouts, scored, earned = self._connection.execute(
            "SELECT coalesce(sum(rollouts), 0), coalesce(sum(scored), 0), sum(earned) FROM file"
        ).fetchone()
        return rollouts, scored, earned / scored if scored else None

    def summarize(self, chosen: Filter | None = None) -> dict[str, Any]:
        """Return numbers of rollouts and tasks, the mean reward with its standard error, and means of other columns.

        `solved_tasks` is the number of tasks with a reward of 1 or more in at least one of their rollouts.
        """
        condition, values = self._build_condition(chosen or Filter())
        row = self._connection.execute(
            "SELECT count(*) AS rollouts, count(reward) AS scored, avg(reward) AS mean, min(reward) AS low,"  # noqa: S608
            " max(reward) AS high, avg(turns) AS turns, avg(tool_calls) AS tool_calls, avg(tokens) AS tokens,"
            " avg(seconds) AS seconds, min(started) AS started,"
            f" max(started + seconds) AS stopped FROM rollout r WHERE {condition}",
            values,
        ).fetchone()
        tasks, solved = self._connection.execute(
            "SELECT count(*), coalesce(sum(best >= 1), 0) FROM (SELECT max(reward) AS best FROM rollout r"  # noqa: S608
            f" WHERE reward IS NOT NULL AND ({condition}) GROUP BY environment, task)",
            values,
        ).fetchone()
        return dict(row) | {
            "stderr": self._compute_stderr(condition, values),
            "tasks": tasks,
            "solved_tasks": solved,
        }

    def count_facets(self, chosen: Filter | None = None) -> dict[str, Any]:
        """Return the number of rollouts of each outcome, end, environment, failure and tool, and a reward histogram."""
        condition, values = self._build_condition(chosen or Filter())
        counts: dict[str, Counter[Any]] = {name: Counter() for name in (*FACET_COLUMNS, "bin")}
        low, width = self._get_bins()
        for *found, number, count in self._connection.execute(
            f"SELECT {', '.join(f'f.{name}' for name in FACET_COLUMNS)}, bin, number FROM"  # noqa: S608
            " (SELECT facets, min(CAST((reward - ?) / ? AS INTEGER), ?) AS bin, count(*) AS number"
            f" FROM rollout r WHERE {condition} GROUP BY 1, 2) JOIN facets f ON f.id = facets",
            (low, width, HISTOGRAM_BINS - 1, *values),
        ):
            for name, value in zip(counts, (*found, number), strict=True):
                counts[name][value] += count
        facets: dict[str, Any] = {name: _list_counts(counts[name]) for name in FACET_COLUMNS}
        facets["tool"] = [
            {"value": name, "count": count}
            for name, count in self._connection.execute(
                "SELECT t.name, count(*) FROM tool t JOIN rollout r ON r.id = t.rollout"  # noqa: S608
                f" WHERE {condition} GROUP BY 1 ORDER BY 2 DESC, 1 LIMIT {MAX_FACET_VALUES}",
                values,
            )
        ]
        found_bins = any(number is not None for number in counts["bin"])
        facets["reward"] = [
            {"low": low + number * width, "high": low + (number + 1) * width, "count": counts["bin"][number]}
            for number in range(HISTOGRAM_BINS if found_bins else 0)
        ]
        facets["figures"] = self.list_figures()
        return facets

    def list_figures(self) -> list[str]:
        """Return the names of the numbers of the verdicts and of the components of the reward."""
        # A recursive step per name is faster than to read every row of the table.
        rows = self._connection.execute(
            "WITH RECURSIVE names(name) AS (SELECT min(name) FROM figure UNION ALL"
            " SELECT (SELECT min(name) FROM figure WHERE name > names.name) FROM names WHERE name IS NOT NULL)"
            " SELECT name FROM names WHERE name IS NOT NULL"
        )
        return [name for (name,) in rows]

    def find_length_components(self) -> list[LengthComponent]:
        """Return the components of the reward that rise with the number of tokens."""
        return find_length_components(self._connection)

    def get_figures(self, rollout: int) -> dict[str, float]:
        """Return the numbers of a rollout's verdict and the components of its reward."""
        rows = self._connection.execute("SELECT name, value FROM figure WHERE rollout = ?", (rollout,))
        return dict(sorted(tuple(row) for row in rows))

    def list_figure_values(self, rollouts: Sequence[int], names: Sequence[str]) -> dict[int, dict[str, float]]:
        """Return the figures *names* of each of some rollouts, given by their ids."""
        marks = [", ".join("?" * len(each)) for each in (rollouts, names)]
        found: dict[int, dict[str, float]] = {}
        for rollout, name, value in self._connection.execute(
            f"SELECT rollout, name, value FROM figure WHERE rollout IN ({marks[0]}) AND name IN ({marks[1]})",  # noqa: S608
            (*rollouts, *names),
        ):
            found.setdefault(rollout, {})[name] = value
        return found

    def get_tools(self, rollout: int) -> dict[str, tuple[int, int]]:
        """Return the number of calls, and of calls with an error, of each tool that a rollout has called."""
        rows = self._connection.execute("SELECT name, calls, errors FROM tool WHERE rollout = ?", (rollout,))
        return {name: (calls, errors) for name, calls, errors in rows}

    def list_groups(self, chosen: Filter | None = None) -> list[dict[str, Any]]:
        """Return each task with the number, the mean and the spread of its rewards, the hardest task first.

        A group with equal rewards teaches a group-based trainer nothing: its *spread* is 0.
        """
        condition, values = self._build_condition(chosen or Filter())
        groups: dict[tuple[str, int], dict[str, Any]] = {}
        for row in self._connection.execute(
            f"SELECT environment, task, repeat, reward, id, prompt FROM rollout r WHERE {condition}"  # noqa: S608
            " ORDER BY environment, task, repeat, id",
            values,
        ):
            environment, task, repeat, reward, rollout, prompt = row
            group = groups.setdefault(
                (environment, task), {"environment": environment, "task": task, "prompt": prompt, "rollouts": []}
            )
            group["rollouts"].append({"id": rollout, "repeat": repeat, "reward": reward})
        for group in groups.values():
            rewards = [each["reward"] for each in group["rollouts"] if each["reward"] is not None]
            group["scored"] = len(rewards)
            group["mean"] = fmean(rewards) if rewards else None
            group["spread"] = pstdev(rewards) if rewards else None
        return sorted(
            groups.values(), key=lambda group: (group["mean"] is not None, group["mean"] or 0.0, group["task"])
        )

    def list_tools(self, chosen: Filter | None = None) -> list[dict[str, Any]]:
        """Return each tool with its calls, its errors, and the mean rewards of the rollouts with and without it."""
        condition, values = self._build_condition(chosen or Filter())
        scored, earned = self._connection.execute(
            f"SELECT count(reward), coalesce(sum(reward), 0) FROM rollout r WHERE {condition}",  # noqa: S608
            values,
        ).fetchone()
        tools = []
        for row in self._connection.execute(
            "SELECT t.name AS tool, sum(t.calls) AS calls, sum(t.errors) AS errors, count(*) AS rollouts,"  # noqa: S608
            " count(r.reward) AS scored, sum(r.reward) AS earned FROM tool t JOIN rollout r ON r.id = t.rollout"
            f" WHERE {condition} GROUP BY 1 ORDER BY 2 DESC, 1",
            values,
        ):
            tool = dict(row)
            with_tool, earned_with = tool.pop("scored"), tool.pop("earned") or 0.0
            without = scored - with_tool
            tool["mean_with"] = earned_with / with_tool if with_tool else None
            tool["mean_without"] = (earned - earned_with) / without if without else None
            tools.append(tool)
        return tools

    def list_failures(self, chosen: Filter | None = None) -> list[dict[str, Any]]:
        """Return each kind of failure with its stage, its number, one of its messages and one of its rollouts."""
        condition, values = self._build_condition(chosen or Filter())
        rows = self._connection.execute(
            "SELECT failure AS kind, stage, count(*) AS count, min(id) AS example,"  # noqa: S608
            f" min(message) AS message FROM rollout r WHERE reward IS NULL AND ({condition})"
            " GROUP BY 1, 2 ORDER BY 3 DESC, 1, 2",
            values,
        )
        return [dict(row) for row in rows]

    def find(self, name: str) -> dict[str, Any] | None:
        """Return the row of the rollout `TASK:REPEAT` or with the id `#ID`, or `None`."""
        found = _ROLLOUT_NAME.fullmatch(name)
        if found is None:
            return None
        numbers = {field: int(number) for field, number in found.groupdict("0").items()}
        wanted = ("id",) if name.startswith("#") else ("task", "repeat")
        rows = self.list_rows(Filter(tuple((field, "=", numbers[field]) for field in wanted)), limit=1)
        return rows[0] if rows else None

    def read_line(self, rollout: int) -> dict[str, Any]:
        """Return the stored line of a rollout."""
        return self.index.read_line(self._connection, rollout)

    def read_bytes(self, rollout: int) -> bytes:
        """Return the bytes of the stored line of a rollout."""
        return self.index.read_bytes(self._connection, rollout)

    def search(self, text: str) -> list[int]:
        """Return the ids of the rollouts with *text* in the conversation, ignoring case; at most `MAX_HITS`."""
        wanted = " ".join(text.split())
        if not wanted:
            return []
        # One view of a run asks for the same text several times: its rows, their number, and its facets.
        progress = self.get_progress()
        known = self._searches.get(wanted)
        if known is None or known[0] != progress:
            known = self._searches[wanted] = progress, self._search(wanted)
            while len(self._searches) > MAX_KEPT_SEARCHES:
                del self._searches[next(iter(self._searches))]
        return known[1]

    def get_searchable_share(self) -> float:
        """Return the share of the rollouts with indexed texts."""
        if not has_search(self._connection):
            return 0.0
        # Ids are given in the order of the lines, and none is missing but those of a replaced file.
        done, last = self._count_indexed()
        return done / last if last else 1.0

    def list_bad_lines(self) -> list[dict[str, Any]]:
        """Return the files with lines that are not rollouts or rows as sent.

        Each has the number of these lines, why the first is not, and the numbers of the first of these lines. A last
        line without an end is one of them as soon as it is not being written any more.
        """
        files = (*self.index.source.files, self.index.source.inputs)
        found = []
        for state in self._connection.execute("SELECT * FROM file WHERE bad > 0 OR size > offset"):
            name = files[state["number"]].name
            lines = [int(number) for number in state["bad_lines"].split(",") if number]
            message, count = state["bad_message"], state["bad"]
            is_left = time.time() - state["modified"] / 1e9 > UNFINISHED_SECONDS
            if state["number"] != INPUTS and state["size"] > state["offset"] and is_left:
                lines, count = [*lines, state["lines"] + 1], count + 1
                message = message or f"{name}:{state['lines'] + 1}: the last line of the file has no end"
            if count:
                found.append({"file": name, "count": count, "message": message, "lines": lines})
        return found

    def list_problems(self) -> list[str]:
        """Return a sentence about each file of the run that cannot be read, or that has lines that cannot be read."""
        files = [f"{bad['file']}: {bad['message']}" for bad in self.index.source.list_bad_files()]
        lines = [
            f"{bad['file']}: {bad['count']} lines cannot be read: {', '.join(map(str, bad['lines']))}"
            f"{', …' if bad['count'] > len(bad['lines']) else ''} ({bad['message']})"
            for bad in self.list_bad_lines()
        ]
        return files + lines

    def _count_indexed(self) -> tuple[int, int]:
        """Return the id of the last rollout with indexed texts, and the id of the last rollout."""
        done = 0
        if has_search(self._connection):
            [done] = self._connection.execute("SELECT coalesce(max(id), 0) FROM texts_done").fetchone()
        [last] = self._connection.execute("SELECT coalesce(max(id), 0) FROM rollout").fetchone()
        return done, last

    def _search(self, wanted: str) -> list[int]:
        words = re.findall(r"[^\W_]+", wanted)
        if not words or self.get_searchable_share() < 1:
            return list(_take(self._verify(self._search_files(wanted), wanted), MAX_HITS))
        # The last word may be the beginning of a longer one.
        query = " AND ".join([*(f'"{word}"' for word in words[:-1]), f'"{words[-1]}"*'])
        if len(words) == 1 and words[0] == wanted:
            rows = self._connection.execute(
                "SELECT rowid FROM text WHERE text MATCH ? ORDER BY rowid LIMIT ?", (query, MAX_HITS)
            )
            return [rollout for (rollout,) in rows]
        places = self._connection.execute(
            "SELECT r.id, r.file, r.offset, r.length FROM text JOIN rollout r ON r.id = text.rowid"
            " WHERE text MATCH ? ORDER BY text.rowid",
            (query,),
        )
        return list(_take(self._verify(map(tuple, places), wanted), MAX_PHRASE_HITS))

    def _verify(self, places: Iterable[Place], wanted: str) -> Iterator[int]:
        """Yield the rollouts at *places* that contain the text *wanted*, ignoring case and white space."""
        pattern = _build_pattern(wanted.lower()) if wanted.isascii() else None
        folded = wanted.casefold()
        with ExitStack() as stack:
            files: dict[int, int] = {}
            for rollout, number, offset, length in places:
                if number not in files:
                    files[number] = stack.enter_context(self.index.open_file(number)).fileno()
                data = os.pread(files[number], length, offset)
                if pattern is not None and not pattern.search(data.lower()):
                    # Most candidates are excluded without parsing them.
                    continue
                try:
                    line = parse_line(data, where=str(self.index.source.path))
                except GymsdkError:
                    # The file is being replaced; the next pass over it will notice.
                    continue
                if any(folded in " ".join(text.split()).casefold() for text in iter_texts(line)):
                    yield rollout

    def _search_files(self, wanted: str) -> Iterator[Place]:
        """Yield the places of the rollouts that contain *wanted*, by reading the files; slower than the index."""
        pattern = _build_pattern(wanted, ignore_case=True)
        for number in range(len(self.index.source.files)):
            yield from self._search_file(number, pattern)

    def _search_file(self, number: int, pattern: re.Pattern[bytes]) -> Iterator[Place]:
        """Yield the places of the rollouts in a file that match *pattern*."""
        try:
            with (
                open_regular(self.index.source.files[number]) as file,
                mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
            ):
                position = 0
                while hit := pattern.search(data, position):
                    row = self._connection.execute(
                        "SELECT id, file, offset, length FROM rollout WHERE file = ? AND offset <= ?"
                        " ORDER BY offset DESC LIMIT 1",
                        (number, hit.start()),
                    ).fetchone()
                    position = hit.end()
                    if row is not None and row["offset"] + row["length"] > hit.start():
                        position = row["offset"] + row["length"]
                        yield tuple(row)
        except (OSError, ValueError):
            # The file does not exist, or it is empty and cannot be mapped.
            return

    def _build_condition(self, chosen: Filter) -> tuple[str, tuple[Any, ...]]:
        """Return an SQL condition on the table `rollout r`, and its values."""
        if len(chosen.where) > MAX_CONDITIONS:
            raise UsageError(f"a filter has {len(chosen.where):,} conditions; at most {MAX_CONDITIONS} are possible")
        if len(chosen.search) > MAX_SEARCH_CHARS:
            raise UsageError(f"the text to search has more than {MAX_SEARCH_CHARS:,} characters")
        check_text(chosen.search)
        parts, values = ["1"], []
        for each in chosen.where:
            part, used = self._build_part(*check_condition(each))
            parts.append(part)
            values += used
        if chosen.search.strip():
            found = self.search(chosen.search)
            parts.append(f"r.id IN ({', '.join(map(str, found))})")
        return " AND ".join(parts), tuple(values)

    def _build_part(self, field: str, operator: str, value: Any) -> tuple[str, list[Any]]:
        if field == "lens":
            lens_condition, lens_values = LENSES[value].build(self._connection)
            return f"({lens_condition})", list(lens_values)
        if field in {"tool", "tool_error"}:
            matched = "t.name = ?" if operator in {"=", "!="} else "t.name LIKE ?"
            errors = " AND t.errors > 0" if field == "tool_error" else ""
            negation = "NOT " if operator == "!=" else ""
            given = value if operator in {"=", "!="} else f"%{value}%"
            return f"{negation}EXISTS (SELECT 1 FROM tool t WHERE t.rollout = r.id AND {matched}{errors})", [given]  # noqa: S608
        if field.startswith(FIGURE):
            compared, used = _compare("f.value", operator, value)
            name = field.removeprefix(FIGURE)
            return (
                f"EXISTS (SELECT 1 FROM figure f WHERE f.rollout = r.id AND f.name = ? AND {compared})",  # noqa: S608
                [name, *used],
            )
        return _compare(f"r.{field}", operator, value)

    def _build_sort_key(self, sort: str) -> tuple[str, tuple[Any, ...]]:
        if sort.startswith(FIGURE):
            name = check_text(sort.removeprefix(FIGURE))
            return "(SELECT f.value FROM figure f WHERE f.rollout = r.id AND f.name = ?)", (name,)
        if sort not in FIELDS:
            raise UsageError(f"there is no field {sort!r} to sort by; the fields: {', '.join(sorted(FIELDS))}")
        return f"r.{sort}", ()

    def _get_bins(self) -> tuple[float, float]:
        """Return the lower end of the histogram of rewards and the width of its bins, which no filter changes."""
        low, high = self._connection.execute("SELECT min(reward), max(reward) FROM rollout").fetchone()
        low, high = min(low or 0.0, 0.0), max(high or 0.0, 1.0)
        return low, (high - low) / HISTOGRAM_BINS

    def _compute_stderr(self, condition: str, values: tuple[Any, ...]) -> float | None:
        """Return the standard error of the mean reward, clustered by task."""
        rows = self._connection.execute(
            f"SELECT sum(reward), count(reward) FROM rollout r WHERE reward IS NOT NULL AND ({condition})"  # noqa: S608
            " GROUP BY environment, task",
            values,
        ).fetchall()
        count = sum(number for _, number in rows)
        if len(rows) < 2:  # noqa: PLR2004 - a single task says nothing about the variance between tasks
            return None
        mean = math.fsum(total for total, _ in rows) / count
        squares = math.fsum((total - mean * number) ** 2 for total, number in rows)
        return float(math.sqrt(squares * len(rows) / (len(rows) - 1)) / count)


@lru_cache(maxsize=16)
def _build_pattern(wanted: str, *, ignore_case: bool = False) -> re.Pattern[bytes]:
    """Return a pattern that finds a text in stored lines, where JSON escapes some of its characters."""
    words = (re.escape(jsonl.dump_portable_json(word)[1:-1]) for word in wanted.split())
    return re.compile(rb"(?:\s|\\[nrt])+".join(words), re.IGNORECASE if ignore_case else 0)


def _list_counts(counts: Counter[str]) -> list[dict[str, Any]]:
    """Return the most frequent values with their counts, equally frequent ones in alphabetical order."""
    found = sorted(((value, count) for value, count in counts.items() if value), key=lambda each: (-each[1], each[0]))
    return [{"value": value, "count": count} for value, count in found[:MAX_FACET_VALUES]]


def _compare(column: str, operator: str, value: Any) -> tuple[str, list[Any]]:
    if operator == "in":
        given = value if isinstance(value, list) else [value]
        return f"{column} IN ({', '.join('?' * len(given))})", list(given)
    if operator == "contains":
        escaped = str(value).replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
        return f"{column} LIKE ? ESCAPE '\\'", [f"%{escaped}%"]
    if operator == "=" and value is None:
        return f"{column} IS NULL", []
    return f"{column} {OPERATORS[operator]} ?", [value]


def _parse_value(text: str) -> str | float | None:
    if text in {"", "none", "null"}:
        return None
    with suppress(ValueError):
        return int(text)
    with suppress(ValueError):
        return float(text)
    return text


def _take(values: Iterable[int], most: int) -> Iterator[int]:
    return (value for _, value in zip(range(most), values, strict=False))
