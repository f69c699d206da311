"""Read the rows that a run plays, from splits or from a task file, and write rows to a file."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO, Self, TypeAlias

from pydantic import ValidationError

from gymsdk import errors, jsonl
from gymsdk.client import UnknownServer
from gymsdk.environment import Environment
from gymsdk.errors import BadOutput, BadRow, GymsdkError, UnknownSplit, UsageError
from gymsdk.metrics import ROLLOUT_INDEX, TASK_INDEX
from gymsdk.rollouts import jobs
from gymsdk.rollouts.folder import strip_results
from gymsdk.rollouts.jobs import get_environment_name
from gymsdk.rollouts.remote import HeadServers, Wanted, has_all
from gymsdk.types import AGENT_SUFFIX, Row, Task, build_agent_reference

Environments = Mapping[str, Environment]
"""Environments by name."""

Sourced = Iterator[tuple[str, Row]]
"""Rows, each with the name of its environment."""


SAMPLE = 1000
"""How many lines of a file are read beforehand to find out whether the servers know their agents."""


class UnknownAgent(BadRow):
    """A row names an agent that the servers do not have."""


def check_one_source(tasks: Path | None, split: str | None) -> None:
    """Raise `UsageError` if both a task file and a split are given."""
    if tasks is not None and split is not None:
        raise UsageError("--tasks reads rows from a file, --split from the environment; choose one of them")


def read_splits(environments: Environments, split: str | None, *, seed: int, limit: int | None) -> Sourced:
    """Yield the rows of *split*, at most *limit* per environment; raises `UnknownSplit`."""
    for name, environment in environments.items():
        for task in islice(environment.tasks(split or get_default_split(environment), seed=seed), limit):
            yield name, task.row()


def get_default_split(environment: Environment) -> str:
    """Return the split to use if none is given: `example` if there is one, else the environment's first."""
    splits = environment.splits
    if not splits:
        raise UnknownSplit(f"environment {environment.name!r} has no splits; name a task file with --tasks")
    return "example" if "example" in splits else splits[0]


def describe_shortages(environments: Environments, split: str | None, *, seed: int, limit: int) -> Iterator[str]:
    """Yield a message for each environment that has fewer than *limit* tasks in *split*, with its other splits.

    The other splits are not read: reading one may download a dataset.
    """
    for name, environment in environments.items():
        used = split or get_default_split(environment)
        count = sum(1 for _ in islice(environment.tasks(used, seed=seed), limit))
        if count >= limit:
            continue
        listed = ", ".join(repr(each) for each in environment.splits if each != used)
        advice = f"; its other splits: {listed} (choose with --split)" if listed else "; it has no other split"
        yield f"split {used!r} of environment {name!r} has {count} tasks, fewer than --limit {limit}{advice}"


def read_file(
    environments: Environments, path: Path, *, limit: int | None, bad: Callable[[BadRow], None] | None = None
) -> Sourced:
    """Yield the rows of a task file without the keys that an earlier run added.

    Args:
        environments: The environments that the rows may be for.
        path: The task file.
        limit: The most rows to yield.
        bad: Called with the error of each invalid row, which is skipped.

    Raises:
        BadRow: A row is invalid, and *bad* is not given.
    """

    def here(row: Row, where: str) -> tuple[str, Row]:
        name = _get_environment_name(environments, row, where)
        row = strip_results(row, keep=environments[name].task_type.model_fields)
        _check_fit(environments[name], row, where)
        return name, row

    return islice(_read_checked(path, here, bad), limit)


def _read_checked(
    path: Path, checked: Callable[[Row, str], tuple[str, Row]], bad: Callable[[BadRow], None] | None
) -> Sourced:
    for number, line in jsonl.read_lines(path):
        where = f"{path}:{number}"
        try:
            task = checked(jsonl.parse_row(line, where=where), where)
        except BadRow as error:
            if bad is None:
                raise
            bad(error)
            continue
        yield task


def read_file_for_servers(
    served: HeadServers,
    names: Sequence[str],
    path: Path,
    *,
    limit: int | None,
    bad: Callable[[BadRow], None] | None = None,
    agent: str | None = None,
) -> Sourced:
    """Yield the rows of a task file that servers play, like `from_file`.

    The servers validate the rows; this function only checks that a row names an agent that they know.

    Args:
        served: The servers.
        names: The environments that the rows may name; empty for any.
        path: The task file.
        limit: The most rows to yield.
        bad: Called with the error of each invalid row, which is skipped.
        agent: The agent of the rows that name none.
    """

    def elsewhere(row: Row, where: str) -> tuple[str, Row]:
        name, row = _address_row(row, where, names, agent)
        try:
            served.get_agent_for_row(row, name)
        except UnknownServer as error:
            raise UnknownAgent(f"{where}: {error}") from None
        return name, row

    return islice(_read_checked(path, elsewhere, bad), limit)


def list_wanted(names: Sequence[str], path: Path, *, limit: int | None, agent: str | None) -> list[Wanted]:
    """Return the agents and environments that the rows of a task file name, in its first `SAMPLE` lines at most."""
    agents: dict[Wanted, None] = {}
    good = 0
    for number, line in islice(jsonl.read_lines(path), SAMPLE):
        try:
            name, row = _address_row(jsonl.parse_row(line, where=str(path)), f"{path}:{number}", names, agent)
        except BadRow:
            # `read_file_for_servers` reports this line.
            continue
        agents[jobs.get_agent_name(row), name] = None
        good += 1
        if good == limit:
            break
    return list(agents)


def has_agents(served: HeadServers, wanted: Iterable[Wanted]) -> bool:
    """Return whether the servers have every agent in *wanted*."""
    return has_all(served.get_agent, wanted)


def _address_row(row: Row, where: str, names: Sequence[str], agent: str | None) -> tuple[str, Row]:
    """Return *row* as it is sent, and the environment that the row is for."""
    row = strip_results(row)
    _check_row(row, where)
    if agent is not None and get_environment_name(row) is None:
        row = {**row, "agent_ref": build_agent_reference(agent)}
    name = get_environment_name(row) or (names[0] if len(names) == 1 else None)
    if name is None:
        raise BadRow(f"{where}: the row does not name its agent; add `agent_ref.name`")
    if names and name not in names:
        raise BadRow(f"{where}: the row is for {name!r}, which is not among the environments of this run")
    return name, row


def find_index_fields(path: Path) -> frozenset[str]:
    """Return the index fields that identify the rows of a task file.

    In the shards of a larger file, `_ng_task_index` differs in each row. In the rows that a run has sent
    (`inputs.jsonl`, NeMo Gym's `_materialized_inputs.jsonl`), `_ng_task_index` and `_ng_rollout_index` together differ.
    In any other file, no index identifies a row.
    """
    conflicts: list[tuple[object, object]] = []
    for _, line in jsonl.read_lines(path):
        try:
            row = jsonl.parse_row(line, where=str(path))
        except BadRow:
            # The function that yields the rows reports this line.
            continue
        conflicts.append((row.get(TASK_INDEX), row.get(ROLLOUT_INDEX)))
    tasks, repeats = zip(*conflicts, strict=True) if conflicts else ((), ())
    if _are_numbers(tasks) and _are_numbers(repeats) and len(set(conflicts)) == len(conflicts):
        return frozenset({TASK_INDEX, ROLLOUT_INDEX})
    return frozenset({TASK_INDEX}) if _are_numbers(tasks) and len(set(tasks)) == len(tasks) else frozenset()


def _are_numbers(values: Sequence[object]) -> bool:
    return bool(values) and all(type(value) is int and value >= 0 for value in values)


def _get_environment_name(environments: Environments, row: Row, where: str) -> str:
    if len(environments) == 1:
        return next(iter(environments))
    name = get_environment_name(row)
    if name is not None and name in environments:
        return name
    listed = ", ".join(environments)
    raise BadRow(
        f"{where}: with several environments, a row must name one of {listed} in `agent_ref.name`; add the name"
    )


def _check_row(row: Row, where: str) -> None:
    try:
        Task.model_validate(row)
    except ValidationError as error:
        raise BadRow(f"{where}: {errors.format_validation_error(error)}; correct or remove the row") from None


def _check_fit(environment: Environment, row: Row, where: str) -> None:
    try:
        environment.read(row)
    except BadRow as error:
        raise BadRow(f"{where}: {error}; correct or remove the row") from None


def interleave_splits(environments: Environments, split: str | None, *, seed: int, limit: int) -> Iterator[Row]:
    """Yield rows of *split*, one per environment in turn, at most *limit* of each; raises `UnknownSplit`.

    Any part of the output is as mixed as the whole, so that a trainer need not shuffle.
    """
    left = [read_splits({name: each}, split, seed=seed, limit=limit) for name, each in environments.items()]
    while left:
        for source in list(left):
            row = _next_row(source)
            if row is None:
                left.remove(source)
            else:
                yield row


async def add_tools(environments: Environments, rows: Iterable[Row], *, seed: int) -> AsyncIterator[Row]:
    """Add to each row the tools that its episode offers: agents on other machines know no others.

    Raises:
        EpisodeError: An episode cannot be opened.
    """
    async with AsyncExitStack() as entered:
        for environment in environments.values():
            await entered.enter_async_context(environment)
        for row in rows:
            yield await environments[get_environment_name(row) or ""].row(row, seed=seed)


def _next_row(source: Sourced) -> Row | None:
    return next(({**row, "agent_ref": build_agent_reference(name + AGENT_SUFFIX)} for name, row in source), None)


@dataclass(slots=True)
class FileCheck:
    """The result of checking a file: the number of valid rows per environment, and the invalid lines with reasons."""

    good: Counter[str] = field(default_factory=Counter)
    bad: list[tuple[int, str]] = field(default_factory=list)


Known: TypeAlias = Callable[[str], Environment | GymsdkError]
"""Returns an environment by name, or the error why it is not available."""


def check_file(path: Path, environment_of: Known, *, only: str | None = None) -> FileCheck:
    """Check each row of a file against its environment.

    Args:
        path: The file.
        environment_of: Returns an environment by name.
        only: The environment of the rows that name none in `agent_ref.name`.

    Raises:
        BadRow: The file cannot be read.
    """
    check = FileCheck()
    for number, line in jsonl.read_lines(path):
        try:
            check.good[_check_line(line, environment_of, only)] += 1
        except BadRow as error:
            check.bad.append((number, str(error).removeprefix("line: ")))
    return check


def _check_line(line: bytes, environment_of: Known, only: str | None) -> str:
    row = jsonl.parse_row(line, where="line")
    name = get_environment_name(row) or only
    if name is None:
        raise BadRow("the row does not name its environment; add `agent_ref.name`")
    environment = environment_of(name)
    if isinstance(environment, GymsdkError):
        raise BadRow(str(environment))
    environment.read(strip_results(row, keep=environment.task_type.model_fields))
    return name


class AtomicRowWriter:
    """Writes a file of rows that appears at its path when it is complete; after an error nothing remains.

    Args:
        path: The file.
        overwrite: Whether an existing file is replaced.

    Raises:
        BadOutput: The file cannot be written, or exists.
    """

    def __init__(self, path: Path, *, overwrite: bool = False) -> None:
        check_output_path(path, overwrite=overwrite)
        self._path = path
        self._file: IO[bytes] | None = None
        self.count = 0

    def __enter__(self) -> Self:
        try:
            self._file = NamedTemporaryFile(dir=self._path.parent, prefix=f".{self._path.name}.", delete=False)
        except OSError as error:
            raise self._build_write_error(error) from None
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        assert self._file is not None, "`__enter__` opens the file"
        part = Path(self._file.name)
        try:
            if kind is None:
                os.fchmod(self._file.fileno(), 0o666 & ~_get_umask())
                self._file.close()
                part.replace(self._path)
        except OSError as error:
            raise self._build_write_error(error) from None
        finally:
            with suppress(OSError):
                self._file.close()
            part.unlink(missing_ok=True)

    def add(self, row: Row) -> None:
        """Write one row."""
        assert self._file is not None, "`__enter__` opens the file"
        try:
            self._file.write(jsonl.dump_row(row))
        except OSError as error:
            raise self._build_write_error(error) from None
        self.count += 1

    def _build_write_error(self, error: OSError) -> BadOutput:
        return BadOutput(f"cannot write {self._path}: {error.strerror}; choose another --output")


def check_output_path(path: Path, *, overwrite: bool) -> None:
    """Raise `BadOutput` if *path* is a folder, or an existing file that must not be replaced."""
    if path.is_dir():
        raise BadOutput(f"{path} is a folder; name a file with --output")
    if path.exists() and not overwrite:
        raise BadOutput(f"{path} exists; replace it with --overwrite, or choose another --output")


def _get_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
