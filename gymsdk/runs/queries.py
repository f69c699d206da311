"""Query the index of a run: lists of rollouts, counts, groups, tools, failures, and the search of texts."""

from __future__ import annotations

import math
import mmap
import os
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import lru_cache
from itertools import pairwise
from statistics import fmean, pstdev
from typing import Any

from gymsdk import jsonl, line
from gymsdk.errors import GymsdkError
from gymsdk.line import StoredRollout
from gymsdk.metrics import compute_bin_edges
from gymsdk.runs import groups
from gymsdk.runs.filters import Filter, add_functions, build_condition, build_filter, build_sort_key
from gymsdk.runs.index import RunIndex
from gymsdk.runs.lenses import LengthComponent, find_length_components
from gymsdk.runs.records import iter_texts
from gymsdk.runs.schema import COLUMNS, FACET_COLUMNS, FAILURE_COLUMNS, INPUTS, has_search
from gymsdk.runs.source import open_regular

Place = tuple[int, int, int, int]
"""The id of a rollout, the number of its file, and the offset and the length of its line."""

MAX_ROWS = 1000
"""The largest number of rollouts of one list."""

MAX_HITS = 10_000
"""The largest number of rollouts that a search finds."""

MAX_PHRASE_HITS = 1000
"""The largest number of rollouts that a search finds for several words, which it verifies in the stored lines."""

MAX_KEPT_SEARCHES = 16
"""The number of search results that are kept until the run grows."""

HISTOGRAM_BINS = 20

MAX_LISTED_VALUES = 50
"""The number of values of a facet that are listed."""

UNFINISHED_SECONDS = 10.0
"""How long a file has not been modified when a last line without an end counts as a line that cannot be read."""

_ROLLOUT_NAME = re.compile(r"#(?P<id>\d{1,18})|(?P<task>\d{1,18})(:(?P<repeat>\d{1,18})?)?")


class RunQueries:
    """Answers questions about one run from its index.

    Args:
        index: The index. It is read as it is; `RunIndex.update` brings it up to date.
    """

    def __init__(self, index: RunIndex) -> None:
        self.index = index
        self._connection = index.connect()
        add_functions(self._connection)
        self._inode = index.path.stat().st_ino
        self._searches: dict[str, tuple[tuple[int, int], list[int]]] = {}

    @property
    def is_current(self) -> bool:
        """Whether this object has opened the file that the index still has."""
        try:
            return self.index.path.stat().st_ino == self._inode
        except OSError:
            return False

    def get_progress(self) -> tuple[int, int]:
        """Return numbers that grow with the rollouts and the indexed texts, also if another process indexes them."""
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
        key, key_values = build_sort_key(sort, self._connection)
        direction = "DESC" if descending else "ASC"
        names = ", ".join(f"r.{name}" for name in ("id", *COLUMNS, *FAILURE_COLUMNS))
        rows = self._connection.execute(
            f"SELECT {names} FROM rollout r WHERE {condition}"  # noqa: S608  # constant names, values as parameters
            f" ORDER BY {key} {direction} NULLS LAST, r.id {direction} LIMIT ? OFFSET ?",
            (*values, *key_values, min(limit, MAX_ROWS), offset),
        )
        return [dict(row) for row in rows]

    def iter_rows(self, chosen: Filter | None = None, *, after: int = 0) -> Iterator[dict[str, Any]]:
        """Yield rollouts as `list_rows` returns them, in the order of the lines, behind the id *after*."""
        condition, values = self._build_condition(chosen or Filter())
        names = ", ".join(f"r.{name}" for name in ("id", *COLUMNS, *FAILURE_COLUMNS))
        statement = f"SELECT {names} FROM rollout r WHERE r.id > ? AND {condition} ORDER BY r.id LIMIT {MAX_ROWS}"  # noqa: S608  # as above
        while rows := self._connection.execute(statement, (after, *values)).fetchall():
            yield from map(dict, rows)
            after = rows[-1]["id"]

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
        edges = self.get_reward_edges()
        bin_case, bin_values = _build_bin_case(edges, 0, HISTOGRAM_BINS - 1)
        for *found, number, count in self._connection.execute(
            f"SELECT {', '.join(f'f.{name}' for name in FACET_COLUMNS)}, bin, number FROM"  # noqa: S608
            f" (SELECT facets, CASE WHEN reward IS NOT NULL THEN {bin_case} END AS bin, count(*) AS number"
            f" FROM rollout r WHERE {condition} GROUP BY 1, 2) JOIN facets f ON f.id = facets",
            (*bin_values, *values),
        ):
            for name, value in zip(counts, (*found, number), strict=True):
                counts[name][value] += count
        facets: dict[str, Any] = {name: _list_counts(counts[name]) for name in FACET_COLUMNS}
        facets["tool"] = [
            {"value": name, "count": count}
            for name, count in self._connection.execute(
                "SELECT t.name, count(*) FROM tool t JOIN rollout r ON r.id = t.rollout"  # noqa: S608
                f" WHERE {condition} GROUP BY 1 ORDER BY 2 DESC, 1 LIMIT {MAX_LISTED_VALUES}",
                values,
            )
        ]
        found_bins = any(number is not None for number in counts["bin"])
        facets["reward"] = [
            {"low": low, "high": high, "count": counts["bin"][number]}
            for number, (low, high) in enumerate(pairwise(edges) if found_bins else ())
        ]
        facets["fields"] = groups.count_values(self._connection, (condition, values))
        facets["figures"] = self.list_figures()
        return facets

    def group(self, by: str, chosen: Filter | None = None) -> list[dict[str, Any]]:
        """Return each value of a field with the number of its rollouts and tasks and their mean reward.

        Args:
            by: A column, `tool`, `tag`, `note`, or a field of the row such as `row:family`.
            chosen: Which rollouts.

        Raises:
            UsageError: The run has no such field.
        """
        return groups.group(self._connection, by, self._build_condition(chosen or Filter()))

    def describe_fields(self) -> dict[str, str]:
        """Return the kind of each field of the rows and annotations: `number`, `text` or `list`."""
        return groups.describe_fields(self._connection)

    def get_fields(self, rollout: int) -> dict[str, list[tuple[str, float | None]]]:
        """Return the fields of a rollout's row and of its annotations: each value as text, and as a number."""
        return groups.get_fields(self._connection, rollout)

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
        marks = [", ".join("?" * len(values)) for values in (rollouts, names)]
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
            rewards = [rollout["reward"] for rollout in group["rollouts"] if rollout["reward"] is not None]
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

    def read(self, rollout: int) -> StoredRollout:
        """Return the stored line of a rollout."""
        return self.index.read(self._connection, rollout)

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
        line without an end counts as soon as it is not being written any more.
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
                    stored = line.parse(data, number=0, where="", exact=False)
                except GymsdkError:
                    # The file is being replaced; the next pass over it will notice.
                    continue
                if any(folded in " ".join(text.split()).casefold() for text in iter_texts(stored)):
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
        checked = build_filter(chosen.where, chosen.search)
        condition, values = build_condition(checked.where, self._connection)
        if checked.search.strip():
            found = self.search(checked.search)
            condition += f" AND r.id IN ({', '.join(map(str, found))})"
        return condition, tuple(values)

    def get_reward_edges(self) -> list[float]:
        """Return the edges of the bins in the histogram of rewards, which no filter changes."""
        low, high = self._connection.execute("SELECT min(reward), max(reward) FROM rollout").fetchone()
        return compute_bin_edges(min(low or 0.0, 0.0), max(high or 0.0, 1.0), HISTOGRAM_BINS)

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


def _build_bin_case(edges: Sequence[float], first: int, last: int) -> tuple[str, list[float]]:
    """Return the SQL for the number of a reward's bin between *first* and *last*, found by binary search."""
    if first == last:
        return str(first), []
    middle = (first + last + 1) // 2
    lower, lower_values = _build_bin_case(edges, first, middle - 1)
    upper, upper_values = _build_bin_case(edges, middle, last)
    return f"CASE WHEN reward < ? THEN {lower} ELSE {upper} END", [edges[middle], *lower_values, *upper_values]


@lru_cache(maxsize=16)
def _build_pattern(wanted: str, *, ignore_case: bool = False) -> re.Pattern[bytes]:
    """Return a pattern that finds a text in stored lines, where JSON escapes some of its characters."""
    words = (re.escape(jsonl.dump_portable_json(word)[1:-1]) for word in wanted.split())
    return re.compile(rb"(?:\s|\\[nrt])+".join(words), re.IGNORECASE if ignore_case else 0)


def _list_counts(counts: Counter[str]) -> list[dict[str, Any]]:
    """Return the most frequent values with their counts, equally frequent ones in alphabetical order."""
    found = sorted(((value, count) for value, count in counts.items() if value), key=lambda pair: (-pair[1], pair[0]))
    return [{"value": value, "count": count} for value, count in found[:MAX_LISTED_VALUES]]


def _take(values: Iterable[int], most: int) -> Iterator[int]:
    return (value for _, value in zip(range(most), values, strict=False))
