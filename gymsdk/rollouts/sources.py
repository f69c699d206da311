"""Where a run's rows come from: a split of an environment, or a file of tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path

from pydantic import ValidationError

from gymsdk import complaints, rows
from gymsdk.client import Unknown
from gymsdk.environment import Environment
from gymsdk.errors import BadRow, UnknownSplit, UsageError
from gymsdk.metrics import ROLLOUT_INDEX, TASK_INDEX
from gymsdk.rollouts import jobs
from gymsdk.rollouts.jobs import route
from gymsdk.rollouts.lines import unplayed
from gymsdk.rollouts.served import Served, Wanted, all_known
from gymsdk.types import Row, Task, agent_reference

Environments = Mapping[str, Environment]
"""Environments by name."""

Sourced = Iterator[tuple[str, Row]]
"""Rows, each with the name of its environment."""


SAMPLE = 1000
"""Lines of a file of which it is asked beforehand whether the servers know their agents."""


class Unserved(BadRow):
    """A row is for an agent that the servers do not have."""


def one_source(tasks: Path | None, split: str | None) -> None:
    """Refuse a run that names both a file of tasks and a split; raises `UsageError`."""
    if tasks is not None and split is not None:
        raise UsageError("--tasks takes the rows of a file, --split those of the environment; choose one of them")


def from_splits(environments: Environments, split: str | None, *, seed: int, limit: int | None) -> Sourced:
    """Yield the rows of *split*, at most *limit* of each environment; raises `UnknownSplit`."""
    for name, environment in environments.items():
        for task in islice(environment.tasks(split or default_split(environment), seed=seed), limit):
            yield name, task.row()


def default_split(environment: Environment) -> str:
    """Give the split to take where none is named: `example`, or else the environment's first."""
    splits = environment.splits
    if not splits:
        raise UnknownSplit(f"environment {environment.name!r} has no tasks of its own; name a file with --tasks")
    return "example" if "example" in splits else splits[0]


def short(environments: Environments, split: str | None, *, seed: int, limit: int) -> Iterator[str]:
    """Say which environments have fewer tasks in *split* than *limit*, and name their other splits.

    The other splits are not read: an author may download a data set for each.
    """
    for name, environment in environments.items():
        used = split or default_split(environment)
        count = sum(1 for _ in islice(environment.tasks(used, seed=seed), limit))
        if count >= limit:
            continue
        listed = ", ".join(repr(each) for each in environment.splits if each != used)
        advice = f"; its other splits: {listed} (choose with --split)" if listed else "; it has no other split"
        yield f"split {used!r} of environment {name!r} has {count} tasks, fewer than --limit {limit}{advice}"


def from_file(
    environments: Environments, path: Path, *, limit: int | None, bad: Callable[[BadRow], None] | None = None
) -> Sourced:
    """Yield the rows of a task file, at most *limit*, without what an earlier run wrote on them.

    Raises `BadRow` at the first row that fits no environment; with *bad* that row is told and left out instead.
    """

    def here(row: Row, where: str) -> tuple[str, Row]:
        name = _routed(environments, row, where)
        row = unplayed(row, keep=environments[name].task_type.model_fields)
        _fits(environments[name], row, where)
        return name, row

    return islice(_each(path, here, bad), limit)


def _each(path: Path, checked: Callable[[Row, str], tuple[str, Row]], bad: Callable[[BadRow], None] | None) -> Sourced:
    for number, line in rows.lines(path):
        where = f"{path}:{number}"
        try:
            found = checked(rows.parsed(line, where=where), where)
        except BadRow as error:
            if bad is None:
                raise
            bad(error)
            continue
        yield found


def from_file_for(
    served: Served,
    names: Sequence[str],
    path: Path,
    *,
    limit: int | None,
    bad: Callable[[BadRow], None] | None = None,
    agent: str | None = None,
) -> Sourced:
    """Yield the rows of a task file for environments elsewhere, like `from_file`; *names*, if any, are all it may name.

    A row that names no agent is for *agent*. Whether it fits is for the servers to say; here it is a row, and is for an
    agent that they know.
    """

    def elsewhere(row: Row, where: str) -> tuple[str, Row]:
        name, row = _addressed(row, where, names, agent)
        try:
            served.agent_of(row, name)
        except Unknown as error:
            raise Unserved(f"{where}: {error}") from None
        return name, row

    return islice(_each(path, elsewhere, bad), limit)


def wanted(names: Sequence[str], path: Path, *, limit: int | None, agent: str | None) -> list[Wanted]:
    """Give whom the rows of a task file are for, like `from_file_for`, those of the first `SAMPLE` lines at least."""
    found: dict[Wanted, None] = {}
    good = 0
    for number, line in islice(rows.lines(path), SAMPLE):
        try:
            name, row = _addressed(rows.parsed(line, where=str(path)), f"{path}:{number}", names, agent)
        except BadRow:
            # Whoever takes the rows tells of it.
            continue
        found[jobs.agent(row), name] = None
        good += 1
        if good == limit:
            break
    return list(found)


def has_agents(served: Served, wanted: Iterable[Wanted]) -> bool:
    """Give whether *served* have every agent that is *wanted*."""
    return all_known(served.agent_named, wanted)


def _addressed(row: Row, where: str, names: Sequence[str], agent: str | None) -> tuple[str, Row]:
    """Give *row* as it is sent, and the environment it is for: one of *names*, if there are any."""
    row = unplayed(row)
    _is_row(row, where)
    if agent is not None and route(row) is None:
        row = {**row, "agent_ref": agent_reference(agent)}
    name = route(row) or (names[0] if len(names) == 1 else None)
    if name is None:
        raise BadRow(f"{where}: the row does not say by `agent_ref.name` which agent it is for; add that")
    if names and name not in names:
        raise BadRow(f"{where}: the row is for {name!r}, which is none of the environments named")
    return name, row


def numbered(path: Path) -> frozenset[str]:
    """Return the index fields of a task file that identify its rows.

    The shards of a larger file number their tasks: `_ng_task_index` differs in each row. The rows that a run has sent
    (`inputs.jsonl`, NeMo Gym's `_materialized_inputs.jsonl`) number their repeats, too: `_ng_task_index` and
    `_ng_rollout_index` differ together. In any other file no index identifies a row.
    """
    found: list[tuple[object, object]] = []
    for _, line in rows.lines(path):
        try:
            row = rows.parsed(line, where=str(path))
        except BadRow:
            # Whoever takes the rows tells of it.
            continue
        found.append((row.get(TASK_INDEX), row.get(ROLLOUT_INDEX)))
    tasks, repeats = zip(*found, strict=True) if found else ((), ())
    if _are_numbers(tasks) and _are_numbers(repeats) and len(set(found)) == len(found):
        return frozenset({TASK_INDEX, ROLLOUT_INDEX})
    return frozenset({TASK_INDEX}) if _are_numbers(tasks) and len(set(tasks)) == len(tasks) else frozenset()


def _are_numbers(values: Sequence[object]) -> bool:
    return bool(values) and all(type(value) is int and value >= 0 for value in values)


def _routed(environments: Environments, row: Row, where: str) -> str:
    if len(environments) == 1:
        return next(iter(environments))
    name = route(row)
    if name is not None and name in environments:
        return name
    listed = ", ".join(environments)
    raise BadRow(
        f"{where}: with several environments a row says by `agent_ref.name` which it is for, one of {listed}; add that"
    )


def _is_row(row: Row, where: str) -> None:
    try:
        Task.model_validate(row)
    except ValidationError as error:
        raise BadRow(f"{where}: {complaints.sentence(error)}; mend or remove the row") from None


def _fits(environment: Environment, row: Row, where: str) -> None:
    try:
        environment.read(row)
    except BadRow as error:
        raise BadRow(f"{where}: {error}; mend or remove the row") from None
