"""Where a run's rows come from: a split of an environment, or a file of tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import count, islice
from pathlib import Path

from gymsdk import rows
from gymsdk.environment import Environment
from gymsdk.errors import BadRow
from gymsdk.jobs import route, stamped
from gymsdk.types import Row

Environments = Mapping[str, Environment]
"""Environments by name."""


def from_splits(environments: Environments, split: str | None, *, seed: int, limit: int | None) -> Iterator[Row]:
    """Yield the stamped rows of *split*, at most *limit* of each environment; raises `UnknownSplit`."""
    numbers = count()
    for name, environment in environments.items():
        tasks = environment.tasks(split or default_split(environment), seed=seed)
        for task in islice(tasks, limit):
            yield stamped(task.row(), environment=name, task=next(numbers))


def default_split(environment: Environment) -> str:
    """Give the split to take where none is named: `example`, or else the environment's first."""
    splits = environment.splits
    return "example" if "example" in splits or not splits else splits[0]


def from_file(
    environments: Environments, path: Path, *, limit: int | None, bad: Callable[[BadRow], None] | None = None
) -> Iterator[Row]:
    """Yield the stamped rows of a task file, at most *limit*.

    Raises `BadRow` at the first row that fits no environment; with *bad* that row is told and left out instead.
    """
    found = islice(_checked(environments, path, bad), limit)
    return (stamped(row, environment=name, task=number) for number, (name, row) in enumerate(found))


def _checked(environments: Environments, path: Path, bad: Callable[[BadRow], None] | None) -> Iterator[tuple[str, Row]]:
    for number, line in rows.lines(path):
        where = f"{path}:{number}"
        try:
            row = rows.parsed(line, where=where)
            name = _routed(environments, row, where)
            environments[name].read(row)
        except BadRow as error:
            told = error if str(error).startswith(where) else BadRow(f"{where}: {error}")
            if bad is None:
                raise told from None
            bad(told)
            continue
        yield name, row


def _routed(environments: Environments, row: Row, where: str) -> str:
    if len(environments) == 1:
        return next(iter(environments))
    name = route(row)
    if name is not None and name in environments:
        return name
    listed = ", ".join(environments)
    raise BadRow(f"{where}: with several environments a row says which by `agent_ref.name`: one of {listed}")
