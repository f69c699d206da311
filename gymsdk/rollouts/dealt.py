"""Dealt rows: tasks of environments in turn, each naming the agent it is for, and whether such rows fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from gymsdk import rows
from gymsdk.environment import Environment
from gymsdk.errors import BadRow, GymsdkError
from gymsdk.rollouts.jobs import route
from gymsdk.rollouts.lines import unplayed
from gymsdk.rollouts.sources import Environments, Sourced, from_splits
from gymsdk.types import AGENT, Row, agent_reference


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
    return next(({**row, "agent_ref": agent_reference(name + AGENT)} for name, row in source), None)


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
    for number, line in rows.lines(path):
        try:
            found.good[_fitted(line, environment_of, only)] += 1
        except BadRow as error:
            found.bad.append((number, str(error).removeprefix("line: ")))
    return found


def _fitted(line: bytes, environment_of: Known, only: str | None) -> str:
    row = rows.parsed(line, where="line")
    name = route(row) or only
    if name is None:
        raise BadRow("the row does not say by `agent_ref.name` which environment it is for; add that")
    environment = environment_of(name)
    if isinstance(environment, GymsdkError):
        raise BadRow(str(environment))
    environment.read(unplayed(row, keep=environment.task_type.model_fields))
    return name
