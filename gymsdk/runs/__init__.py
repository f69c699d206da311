"""Read stored runs: list, filter and search their rollouts, compare them, and turn them into data frames.

run = gymsdk.runs.read("rollouts/math-20260101-120000")
run.list_rows(where=["reward<1", "turns>4"], limit=10)
run.dataframe().groupby("environment")["reward"].mean()
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from gymsdk.runs import tables
from gymsdk.runs.compare import Comparison, compare
from gymsdk.runs.filters import Condition, Filter, build_filter, parse_condition
from gymsdk.runs.index import RunIndex
from gymsdk.runs.queries import RunQueries
from gymsdk.runs.source import RunSource, find_run, find_runs
from gymsdk.runs.tables import Table
from gymsdk.types import Row

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = [
    "Comparison",
    "Filter",
    "Run",
    "RunSource",
    "Table",
    "build_filter",
    "find_run",
    "find_runs",
    "parse_condition",
    "read",
]

Where = Sequence[str | Condition]
"""Conditions that must all hold, as text (`reward<1`) or as a field, an operator and a value."""


class Run:
    """A stored run. `with run:` closes its index at the end.

    Args:
        source: The files of the run.

    Attributes:
        source: The files of the run.
        index: The index of its rollouts in the user's cache folder.
        queries: Answers questions about the rollouts.
    """

    def __init__(self, source: RunSource) -> None:
        self.source = source
        self.index = RunIndex(source)
        self.index.update()
        self.queries = RunQueries(self.index)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __len__(self) -> int:
        """Return the number of rollouts, with and without a reward."""
        return self.queries.count()

    def __iter__(self) -> Iterator[Row]:
        """Yield the stored lines of the rollouts."""
        return (self.queries.read(row["id"]).line for row in self.iter_rows())

    def __getitem__(self, name: str) -> Row:
        """Return the stored line of the rollout `TASK:REPEAT`.

        Raises:
            KeyError: The run has no such rollout.
        """
        found = self.queries.find(name)
        if found is None:
            raise KeyError(name)
        return self.queries.read(found["id"]).line

    @property
    def name(self) -> str:
        """The name of the run's folder or file."""
        return self.source.name

    @property
    def settings(self) -> Row:
        """The settings with which the run was started; empty for a file of another program."""
        return self.source.read_about().get("settings") or {}

    @property
    def metrics(self) -> list[Row]:
        """The metrics of each environment, as in `metrics.json`; empty before the end of the run."""
        return self.source.read_metrics()

    def update(self) -> bool:
        """Read the rollouts that were written or rewritten meanwhile; return whether anything changed."""
        return self.index.update()

    def close(self) -> None:
        """Close the index."""
        self.queries.close()

    def list_rows(
        self,
        where: Where = (),
        *,
        search: str = "",
        sort: str = "id",
        descending: bool = False,
        offset: int = 0,
        limit: int = 100,
    ) -> list[Row]:
        """Return rollouts with the columns of the index, such as environment, task, repeat, reward, turns and tokens.

        Args:
            where: Conditions that must all hold, such as `reward<1` or `tool=get_weather`.
            search: A text that must occur in the conversation.
            sort: The field to sort by.
            descending: Whether the largest value comes first.
            offset: The number of rollouts to skip.
            limit: The most rollouts to return, at most 1,000.

        Raises:
            UsageError: A condition is not valid.
        """
        if search:
            self.index.update_texts()
        chosen = build_filter(where, search)
        return self.queries.list_rows(chosen, sort=sort, descending=descending, offset=offset, limit=limit)

    def iter_rows(self, *, after: int = 0) -> Iterator[Row]:
        """Yield the rows of rollouts as `list_rows` returns them, in the order of the lines, behind the id *after*."""
        return self.queries.iter_rows(after=after)

    def compare(self, other: Run, *, seed: int = 0, by: str | None = None) -> Comparison:
        """Compare this run with *other*, task by task; a positive difference means that *other* is better.

        Args:
            other: The other run.
            seed: The seed of the bootstrap.
            by: A field by which the tasks are grouped, too, such as `row:family`.
        """
        return compare(self.index, other.index, seed=seed, by=by)

    def group(self, by: str, *, where: Where = ()) -> list[Row]:
        """Return each value of a field with the number of its rollouts and tasks and their mean reward.

        Args:
            by: A column, `tool`, `tag`, `note`, or a field of the row such as `row:family`.
            where: Conditions that the rollouts must meet.

        Raises:
            UsageError: The run has no such field, or a condition is not valid.
        """
        return self.queries.group(by, build_filter(where))

    def arrow(self, table: Table = "rollouts", *, where: Where = ()) -> pa.Table:
        """Return a table of the run as an Arrow table (`gymsdk[arrow]`).

        Args:
            table: `rollouts`, `messages`, `tool_calls`, `steps` or `metrics`.
            where: Conditions that the rollouts must meet.

        Raises:
            UsageError: pyarrow is not installed, or an argument is not valid.
        """
        return tables.build_arrow(self.queries, table, build_filter(where))

    def dataframe(
        self, table: Table = "rollouts", *, where: Where = (), library: Literal["pandas", "polars"] | None = None
    ) -> Any:
        """Return a table of the run as a data frame (`gymsdk[pandas]` or `gymsdk[polars]`).

        Args:
            table: `rollouts`, `messages`, `tool_calls`, `steps` or `metrics`.
            where: Conditions that the rollouts must meet.
            library: The library of the data frame; by default pandas if it is installed, else polars.

        Raises:
            UsageError: The library is not installed, or an argument is not valid.
        """
        return tables.build_dataframe(self.queries, table, build_filter(where), library=library)

    def write_parquet(self, path: str | Path, table: Table = "rollouts", *, where: Where = ()) -> int:
        """Write a table of the run to a Parquet file (`gymsdk[arrow]`), and return the number of rows.

        Args:
            path: The file.
            table: `rollouts`, `messages`, `tool_calls`, `steps` or `metrics`.
            where: Conditions that the rollouts must meet.

        Raises:
            UsageError: pyarrow is not installed, the file cannot be written, or an argument is not valid.
        """
        return tables.write_parquet(self.queries, Path(path), table, build_filter(where))


def read(path: str | Path) -> Run:
    """Return the run at *path*: a folder that `gymsdk rollout` wrote, or a JSONL file of rollouts.

    The first call reads all lines; later calls read the new ones. The values are kept in the user's cache folder.

    Raises:
        UsageError: There is no run.
        GymsdkError: The cache folder cannot be written.
    """
    return Run(find_run(Path(path)))
