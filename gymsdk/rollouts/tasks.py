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
from gymsdk.line import ROLLOUT_INDEX, TASK_INDEX, get_agent_name, get_environment_name, strip_results
from gymsdk.rollouts.remote import HeadServers, Wanted, has_all
from gymsdk.types import AGENT_SUFFIX, Row, Task, build_agent_reference
from gymsdk.working_folder import shorten_path

Environments = Mapping[str, Environment]
"""Environments by name."""

NamedRows = Iterator[tuple[str, Row]]
"""Rows, each with the name of its environment."""


MAX_SAMPLED_LINES = 1000
"""How many lines of a file are read before a run, to check whether the servers know the agents of the rows."""


class UnknownAgent(BadRow):
    """A row names an agent that the servers do not have."""


def check_one_source(tasks: Path | None, split: str | None) -> None:
    """Raise `UsageError` if both a task file and a split are given."""
    if tasks is not None and split is not None:
        raise UsageError("--tasks reads rows from a file, --split from the environment; choose one of them")


def read_splits(environments: Environments, split: str | None, *, seed: int, limit: int | None) -> NamedRows:
    """Yield the rows of *split*, at most *limit* per environment.

    Args:
        environments: The environments.
        split: The split; by default the default split of each environment.
        seed: The seed of generated rows.
        limit: The largest number of rows per environment, or `None`.

    Raises:
        UnknownSplit: An environment does not have the split.
    """
    for name, environment in environments.items():
        for task in islice(environment.tasks(split or get_default_split(environment), seed=seed), limit):
            yield name, task.row()


def get_default_split(environment: Environment) -> str:
    """Return the split to use if the user names none: `example` if it exists, else the environment's first split.

    Raises:
        UnknownSplit: The environment has no splits.
    """
    splits = environment.splits
    if not splits:
        raise UnknownSplit(f"environment {environment.name!r} has no splits; name a task file with --tasks")
    return "example" if "example" in splits else splits[0]


def describe_shortages(
    environments: Environments, split: str | None, *, counts: Mapping[str, int], limit: int
) -> Iterator[str]:
    """Yield a message for each environment that has fewer than *limit* tasks in *split*, with its other splits.

    The other splits are not read: reading one may download a dataset.

    Args:
        environments: The environments.
        split: The split; by default the default split of each environment.
        counts: The number of tasks of each environment.
        limit: The number of tasks that were to be played.
    """
    for name, environment in environments.items():
        count = counts[name]
        if count >= limit:
            continue
        split_name = split or get_default_split(environment)
        listed = ", ".join(repr(other) for other in environment.splits if other != split_name)
        advice = f"; its other splits: {listed} (choose with --split)" if listed else "; it has no other split"
        yield f"split {split_name!r} of environment {name!r} has {count} tasks, fewer than --limit {limit}{advice}"


def read_file(
    environments: Environments, path: Path, *, limit: int | None, bad: Callable[[BadRow], None] | None = None
) -> NamedRows:
    """Yield the rows of a task file without the keys that an earlier run added.

    Args:
        environments: The environments that the rows may be for.
        path: The task file.
        limit: The largest number of rows to yield.
        bad: Called with the error of each invalid row, which is skipped.

    Raises:
        BadRow: A row is invalid, and *bad* is not given.
    """

    def parse(row: Row, where: str) -> tuple[str, Row]:
        name = _get_environment_name(environments, row, where)
        row = strip_results(row, keep=environments[name].task_type.model_fields)
        _check_fit(environments[name], row, where)
        return name, row

    return islice(_read_parsed_rows(path, parse, bad), limit)


def _read_parsed_rows(
    path: Path, parse: Callable[[Row, str], tuple[str, Row]], bad: Callable[[BadRow], None] | None
) -> NamedRows:
    for number, line in jsonl.read_lines(path):
        where = f"{shorten_path(path)}:{number}"
        try:
            named_row = parse(jsonl.parse_row(line, where=where), where)
        except BadRow as error:
            if bad is None:
                raise
            bad(error)
            continue
        yield named_row


def read_file_for_servers(
    served: HeadServers,
    names: Sequence[str],
    path: Path,
    *,
    limit: int | None,
    bad: Callable[[BadRow], None] | None = None,
    agent: str | None = None,
) -> NamedRows:
    """Yield the rows of a task file for rollouts on servers, without the keys that an earlier run added.

    The servers validate the rows; this function only checks that a row names an agent that they know.

    Args:
        served: The servers.
        names: The environments that the rows may name; empty for any.
        path: The task file.
        limit: The largest number of rows to yield.
        bad: Called with the error of each invalid row, which is skipped.
        agent: The agent of the rows that name no agent.

    Raises:
        BadRow: A row is invalid or names an unknown agent, and *bad* is not given.
    """

    def parse(row: Row, where: str) -> tuple[str, Row]:
        name, row = _address_row(row, where, names, agent)
        try:
            served.get_agent_for_row(row, name)
        except UnknownServer as error:
            raise UnknownAgent(f"{where}: {error}") from None
        return name, row

    return islice(_read_parsed_rows(path, parse, bad), limit)


def list_wanted(names: Sequence[str], path: Path, *, limit: int | None, agent: str | None) -> list[Wanted]:
    """Return the agents and environments that the first `MAX_SAMPLED_LINES` rows of a task file name."""
    wanted: dict[Wanted, None] = {}
    count = 0
    for number, line in islice(jsonl.read_lines(path), MAX_SAMPLED_LINES):
        try:
            where = f"{shorten_path(path)}:{number}"
            name, row = _address_row(jsonl.parse_row(line, where=where), where, names, agent)
        except BadRow:
            # `read_file_for_servers` reports this line.
            continue
        wanted[get_agent_name(row), name] = None
        count += 1
        if count == limit:
            break
    return list(wanted)


def has_agents(served: HeadServers, wanted: Iterable[Wanted]) -> bool:
    """Return whether the servers have every agent in *wanted*."""
    return has_all(served.get_agent, wanted)


def _address_row(row: Row, where: str, names: Sequence[str], agent: str | None) -> tuple[str, Row]:
    """Return the name of the environment that *row* is for, and the row to send, which names its agent.

    Raises:
        BadRow: The row is invalid, or names no agent or another environment than *names*.
    """
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

    In a shard of a larger file, `_ng_task_index` identifies a row. In a file of the rows that a run has sent
    (`inputs.jsonl`, NeMo Gym's `_materialized_inputs.jsonl`), `_ng_task_index` and `_ng_rollout_index` together
    identify a row. In other files, no index does.
    """
    indexes: list[tuple[object, object]] = []
    for _, line in jsonl.read_lines(path):
        try:
            row = jsonl.parse_row(line, where=str(shorten_path(path)))
        except BadRow:
            # The function that yields the rows reports this line.
            continue
        indexes.append((row.get(TASK_INDEX), row.get(ROLLOUT_INDEX)))
    tasks, repeats = zip(*indexes, strict=True) if indexes else ((), ())
    if _are_numbers(tasks) and _are_numbers(repeats) and len(set(indexes)) == len(indexes):
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

    The environments alternate in the whole output, so that a trainer need not shuffle the rows.
    """
    sources = [
        read_splits({name: environment}, split, seed=seed, limit=limit) for name, environment in environments.items()
    ]
    while sources:
        for source in list(sources):
            row = _next_row(source)
            if row is None:
                sources.remove(source)
            else:
                yield row


async def add_tools(environments: Environments, rows: Iterable[Row], *, seed: int) -> AsyncIterator[Row]:
    """Yield the rows with the tools that their episodes offer: an agent on another machine knows only these tools.

    Raises:
        EpisodeError: An episode cannot be opened.
    """
    async with AsyncExitStack() as entered:
        for environment in environments.values():
            await entered.enter_async_context(environment)
        for row in rows:
            yield await environments[get_environment_name(row) or ""].row(row, seed=seed)


def _next_row(source: NamedRows) -> Row | None:
    """Return the next row of *source* with the name of its agent, or `None` at the end."""
    return next(({**row, "agent_ref": build_agent_reference(name + AGENT_SUFFIX)} for name, row in source), None)


@dataclass(slots=True)
class FileCheck:
    """The result of checking a file: the number of valid rows per environment, and the invalid lines with reasons."""

    good: Counter[str] = field(default_factory=Counter)
    bad: list[tuple[int, str]] = field(default_factory=list)


EnvironmentLookup: TypeAlias = Callable[[str], Environment | GymsdkError]
"""Returns the environment with a name, or the error that explains why the environment is not available."""


def check_file(path: Path, find_environment: EnvironmentLookup, *, default: str | None = None) -> FileCheck:
    """Check each row of a file against its environment.

    Args:
        path: The file.
        find_environment: Returns an environment by name.
        default: The environment of the rows that name no environment in `agent_ref.name`.

    Raises:
        BadRow: The file cannot be read.
    """
    result = FileCheck()
    for number, line in jsonl.read_lines(path):
        try:
            result.good[_check_line(line, find_environment, default)] += 1
        except BadRow as error:
            result.bad.append((number, str(error).removeprefix("line: ")))
    return result


def _check_line(line: bytes, find_environment: EnvironmentLookup, default: str | None) -> str:
    """Return the name of the environment of a valid row; raises `BadRow` if the row is invalid."""
    row = jsonl.parse_row(line, where="line")
    name = get_environment_name(row) or default
    if name is None:
        raise BadRow("the row does not name its environment; add `agent_ref.name`")
    environment = find_environment(name)
    if isinstance(environment, GymsdkError):
        raise BadRow(str(environment))
    environment.read(strip_results(row, keep=environment.task_type.model_fields))
    return name


class AtomicRowWriter:
    """Writes rows to a temporary file, which replaces the file at *path* when it is complete.

    After an error, the temporary file is removed.

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
        raise BadOutput(f"{shorten_path(path)} is a folder; name a file with --output")
    if path.exists() and not overwrite:
        raise BadOutput(f"{shorten_path(path)} exists; replace it with --overwrite, or choose another --output")


def _get_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
