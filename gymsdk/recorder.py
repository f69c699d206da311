"""A recorder: reads rows of environments as they are needed, and plays each once to know what is said in it."""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

from gymsdk import recordings, rows
from gymsdk.environment import Environment
from gymsdk.episode import request_of
from gymsdk.errors import BadRow, GymsdkError, UnknownSplit
from gymsdk.recordings import Recording, Recordings
from gymsdk.rollouts.jobs import Job, seed_of
from gymsdk.rollouts.sources import Environments, Sourced, from_file, from_splits
from gymsdk.sitting import Budget, Sitting
from gymsdk.types import Model, Row
from gymsdk.workers.threads import Threads

LIMIT = 10_000
"""How many rows are read where nobody says how many."""

LARGEST = 256 * 1024**2
"""Bytes of recordings after which no more rows are read."""

AT_ONCE = 8
"""Rows that are read and played at once."""

READING = 60.0
"""Seconds that an environment may take for so many rows."""

BUDGET = Budget(seconds=60.0)
"""What the playing of one row may use."""

log = logging.getLogger("gymsdk")


def of_splits(environments: Environments, split: str | None = None, *, seed: int = 0) -> list[Sourced]:
    """Give the rows of every split of *environments*, or those of one; raises `UnknownSplit` where nobody has it."""
    chosen = [
        from_splits({name: environment}, each, seed=seed, limit=None)
        for name, environment in environments.items()
        for each in environment.splits
        if split in {None, each}
    ]
    if split is not None and not chosen:
        raise UnknownSplit(f"no split {split!r} in {', '.join(environments)}; `gymsdk info NAME` lists those there are")
    return chosen


def of_file(environments: Environments, path: Path) -> list[Sourced]:
    """Give the rows of a task file that fit one of *environments*; raises `BadRow` where there is none."""

    def told(error: BadRow) -> None:
        log.warning("left out: %s", error)

    found = from_file(environments, path, limit=None, bad=told)
    first = list(islice(found, 1))
    if not first:
        raise BadRow(f"{path} holds no row that fits {' or '.join(environments)}; name another file with --tasks")
    return [chain(first, found)]


class _Place(NamedTuple):
    """A *row* of an *environment*, and the seed it is played with."""

    environment: str
    row: Row
    seed: int


class Recorder:
    """Plays the rows of *sources* in turn with *model*, at most *limit* of them, into *found*.

    Raises nothing for a row or a source that is broken: `story` tells of it.
    """

    def __init__(
        self, environments: Environments, model: Model, sources: Sequence[Sourced], *, limit: int = LIMIT, seed: int = 0
    ) -> None:
        self.found = Recordings()
        self._environments = environments
        self._model = model
        self._sources: list[Iterator[_Place]] = [_seeded(each, seed) for each in sources]
        self._turn = 0
        self._left = limit
        self._size = 0
        self._read: Counter[str] = Counter(dict.fromkeys(environments, 0))
        self._trouble = ""
        self._threads = Threads(limit=1)
        self._batch: asyncio.Task[None] | None = None

    @property
    def over(self) -> bool:
        """Whether all rows have been played that are to be."""
        under_way = self._batch is not None and not self._batch.done()
        return not under_way and (not self._sources or self._left <= 0 or self._size >= LARGEST)

    @property
    def story(self) -> str:
        """What has been read so far, and what went wrong last."""
        read = ", ".join(f"{count:,} of {name}" for name, count in self._read.items())
        return f"{read}{f'; the last that could not be played: {self._trouble}' if self._trouble else ''}"

    async def more(self, seconds: float) -> None:
        """Play the next few rows, together with all who ask meanwhile; wait for that at most *seconds*."""
        if self._batch is None or self._batch.done():
            self._batch = asyncio.ensure_future(self._played())
        done, _ = await asyncio.wait({self._batch}, timeout=seconds)
        for each in done:
            each.result()

    async def aclose(self) -> None:
        """Leave what is being played."""
        if self._batch is not None:
            self._batch.cancel()
            await asyncio.wait({self._batch})

    async def _played(self) -> None:
        dealt = await self._dealt()
        self._left -= len(dealt)
        async with asyncio.TaskGroup() as group:
            playing = [group.create_task(self._recorded(each)) for each in dealt]
        for each in (task.result() for task in playing):
            if each is not None and self.found.is_new(each):
                self._size += each.size
                self.found.add(each)

    async def _dealt(self) -> list[_Place]:
        # Reading runs an author's code, which may take its time; the event loop has others to serve.
        try:
            return await self._threads.run(self._deal, min(AT_ONCE, self._left), timeout=READING)
        except TimeoutError:
            self._sources, self._trouble = [], f"to read {AT_ONCE} rows takes more than {READING:g} s"
            return []

    def _deal(self, count: int) -> list[_Place]:
        """Give the next *count* rows, one of each source in turn."""
        dealt: list[_Place] = []
        while self._sources and len(dealt) < count:
            place = self._turn % len(self._sources)
            try:
                dealt.append(next(self._sources[place]))
                self._turn = place + 1
            except (StopIteration, GymsdkError) as error:
                self._trouble = str(error) or self._trouble
                del self._sources[place]
                self._turn = place
        return dealt

    async def _recorded(self, place: _Place) -> Recording | None:
        name = place.environment
        try:
            found = await recorded(self._environments[name], self._model, place.row, seed=place.seed)
        except GymsdkError as error:
            self._trouble = f"{name}: {error}"
            return None
        self._read[name] += 1
        return found


async def recorded(environment: Environment, model: Model, row: Row, *, seed: int) -> Recording:
    """Give what *model* says in an episode of *row*, which nobody judges; raises `GymsdkError`."""
    sitting, asked, said, opening = Sitting(environment, BUDGET), [], [], None
    try:
        episode = await sitting.open(row, seed=seed)
        while not sitting.is_over:
            request = request_of(episode, {})
            response = await model.respond(request, episode=episode)
            history, instructions = recordings.history(request), request.get("instructions")
            asked.append(recordings.marks(history, instructions)[-1])
            opening = opening or recordings.openings(history, instructions)[-1]
            said.append(response["output"])
            await sitting.apply_response(response)
    finally:
        await sitting.close()
    played = recordings.recording(asked, said, opening)
    return replace(played, environment=environment.name, row=packed(row), seed=seed)


def packed(row: Row) -> bytes:
    """Give *row* in less space."""
    return zlib.compress(rows.written(row), 1)


def unpacked(row: bytes) -> Row:
    """Give the row that was `packed`."""
    return rows.parsed(zlib.decompress(row), where="a recording")


def _seeded(source: Sourced, seed: int) -> Iterator[_Place]:
    """Yield rows with the seeds that a run of `gymsdk rollout` over the same rows gives them."""
    for number, (name, row) in enumerate(source):
        yield _Place(name, row, seed_of(seed, Job(name, number, 0, row)))
