"""A sheet: a file of rows that is there once it is whole, and never takes another's place unasked."""

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
from gymsdk.rollouts.folder import unplayed
from gymsdk.rollouts.jobs import route
from gymsdk.rollouts.remote import Served, Wanted, all_known
from gymsdk.types import AGENT_SUFFIX, Row, Task, build_agent_reference

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
    for number, line in jsonl.read_lines(path):
        where = f"{path}:{number}"
        try:
            found = checked(jsonl.parse_row(line, where=where), where)
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
        except UnknownServer as error:
            raise Unserved(f"{where}: {error}") from None
        return name, row

    return islice(_each(path, elsewhere, bad), limit)


def wanted(names: Sequence[str], path: Path, *, limit: int | None, agent: str | None) -> list[Wanted]:
    """Give whom the rows of a task file are for, like `from_file_for`, those of the first `SAMPLE` lines at least."""
    found: dict[Wanted, None] = {}
    good = 0
    for number, line in islice(jsonl.read_lines(path), SAMPLE):
        try:
            name, row = _addressed(jsonl.parse_row(line, where=str(path)), f"{path}:{number}", names, agent)
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
        row = {**row, "agent_ref": build_agent_reference(agent)}
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
    for _, line in jsonl.read_lines(path):
        try:
            row = jsonl.parse_row(line, where=str(path))
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
        raise BadRow(f"{where}: {errors.format_validation_error(error)}; mend or remove the row") from None


def _fits(environment: Environment, row: Row, where: str) -> None:
    try:
        environment.read(row)
    except BadRow as error:
        raise BadRow(f"{where}: {error}; mend or remove the row") from None


def dealt(environments: Environments, split: str | None, *, seed: int, limit: int) -> Iterator[Row]:
    """Yield rows of *split*, one of each environment in turn, at most *limit* of each; raises `UnknownSplit`.

    Any stretch of them is as mixed as the whole: nobody has to shuffle first.
    """
    left = [from_splits({name: each}, split, seed=seed, limit=limit) for name, each in environments.items()]
    while left:
        for source in list(left):
            row = _next(source)
            if row is None:
                left.remove(source)
            else:
                yield row


async def equipped(environments: Environments, found: Iterable[Row], *, seed: int) -> AsyncIterator[Row]:
    """Yield the rows *found*, each with the tools its episode offers: agents elsewhere know no others.

    Raises `EpisodeError` where an episode cannot be opened.
    """
    async with AsyncExitStack() as entered:
        for environment in environments.values():
            await entered.enter_async_context(environment)
        for row in found:
            yield await environments[route(row) or ""].row(row, seed=seed)


def _next(source: Sourced) -> Row | None:
    return next(({**row, "agent_ref": build_agent_reference(name + AGENT_SUFFIX)} for name, row in source), None)


@dataclass(slots=True)
class Checked:
    """What a check of a file has found: good rows by environment, and the bad lines, each with its reason."""

    good: Counter[str] = field(default_factory=Counter)
    bad: list[tuple[int, str]] = field(default_factory=list)


Known: TypeAlias = Callable[[str], Environment | GymsdkError]
"""Gives an environment by name, or why it is not to be had."""


def checked(path: Path, environment_of: Known, *, only: str | None = None) -> Checked:
    """Give which rows of a file fit their environment, the one `agent_ref.name` says, or else *only*.

    Raises `BadRow` where the file cannot be read.
    """
    found = Checked()
    for number, line in jsonl.read_lines(path):
        try:
            found.good[_fitted(line, environment_of, only)] += 1
        except BadRow as error:
            found.bad.append((number, str(error).removeprefix("line: ")))
    return found


def _fitted(line: bytes, environment_of: Known, only: str | None) -> str:
    row = jsonl.parse_row(line, where="line")
    name = route(row) or only
    if name is None:
        raise BadRow("the row does not say by `agent_ref.name` which environment it is for; add that")
    environment = environment_of(name)
    if isinstance(environment, GymsdkError):
        raise BadRow(str(environment))
    environment.read(unplayed(row, keep=environment.task_type.model_fields))
    return name


class Sheet:
    """The file at *path*, written as `with sheet:`; nothing is left of one that ends in an error.

    Raises `BadOutput` where it cannot be written, or is there and not to be replaced (*overwrite*).
    """

    def __init__(self, path: Path, *, overwrite: bool = False) -> None:
        free(path, overwrite=overwrite)
        self._path = path
        self._file: IO[bytes] | None = None
        self.count = 0

    def __enter__(self) -> Self:
        try:
            self._file = NamedTemporaryFile(dir=self._path.parent, prefix=f".{self._path.name}.", delete=False)
        except OSError as error:
            raise self._unwritten(error) from None
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        assert self._file is not None, "a sheet is entered before it is left"
        part = Path(self._file.name)
        try:
            if kind is None:
                os.fchmod(self._file.fileno(), 0o666 & ~_mask())
                self._file.close()
                part.replace(self._path)
        except OSError as error:
            raise self._unwritten(error) from None
        finally:
            with suppress(OSError):
                self._file.close()
            part.unlink(missing_ok=True)

    def add(self, row: Row) -> None:
        """Write one row."""
        assert self._file is not None, "a sheet is entered before it is written"
        try:
            self._file.write(jsonl.dump_row(row))
        except OSError as error:
            raise self._unwritten(error) from None
        self.count += 1

    def _unwritten(self, error: OSError) -> BadOutput:
        return BadOutput(f"cannot write {self._path}: {error.strerror}; choose another --output")


def free(path: Path, *, overwrite: bool) -> None:
    """Refuse to write where something is that is not to be replaced; raises `BadOutput`."""
    if path.is_dir():
        raise BadOutput(f"{path} is a folder; name a file with --output")
    if path.exists() and not overwrite:
        raise BadOutput(f"{path} is there; replace it with --overwrite, or choose another --output")


def _mask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
