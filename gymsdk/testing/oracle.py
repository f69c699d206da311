"""The oracle for those who bring a conversation and no episode: it finds the row that opens like it."""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple, Self

from gymsdk import jsonl
from gymsdk.environment import Environment
from gymsdk.episode import Budget, EpisodeRunner, build_request
from gymsdk.errors import BadRow, Failed, GymsdkError, UnknownSplit
from gymsdk.models import recordings
from gymsdk.models.recordings import Recording, RecordingStore
from gymsdk.models.scripted import ScriptedModel
from gymsdk.responses import iter_turn_spans
from gymsdk.rollouts.jobs import Job, seed_of
from gymsdk.rollouts.tasks import Environments, Sourced, from_file, from_splits, one_source
from gymsdk.threads import ThreadPool
from gymsdk.types import Episode, Item, Model, Row

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
        self.found = RecordingStore()
        self._environments = environments
        self._model = model
        self._sources: list[Iterator[_Place]] = [_seeded(each, seed) for each in sources]
        self._turn = 0
        self._left = limit
        self._size = 0
        self._read: Counter[str] = Counter(dict.fromkeys(environments, 0))
        self._trouble = ""
        self._threads = ThreadPool(limit=1)
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
    sitting, asked, said, opening = EpisodeRunner(environment, BUDGET), [], [], None
    try:
        episode = await sitting.open(row, seed=seed)
        while not sitting.is_over:
            request = build_request(episode, {})
            response = await model.respond(request, episode=episode)
            history, instructions = recordings.get_input_items(request), request.get("instructions")
            asked.append(recordings.compute_digests(history, instructions)[-1])
            opening = opening or recordings.compute_openings(history, instructions)[-1]
            said.append(response["output"])
            await sitting.apply_response(response)
    finally:
        await sitting.close()
    played = recordings.build_recording(asked, said, opening)
    return replace(played, environment=environment.name, row=packed(row), seed=seed)


def packed(row: Row) -> bytes:
    """Give *row* in less space."""
    return zlib.compress(jsonl.dump_portable_json(row), 1)


def unpacked(row: bytes) -> Row:
    """Give the row that was `packed`."""
    return jsonl.parse_row(zlib.decompress(row), where="a recording")


def _seeded(source: Sourced, seed: int) -> Iterator[_Place]:
    """Yield rows with the seeds that a run of `gymsdk rollout` over the same rows gives them."""
    for number, (name, row) in enumerate(source):
        yield _Place(name, row, seed_of(seed, Job(name, number, 0, row)))


NAMED = "scripted/oracle"
"""How the names of the models begin that need an episode."""

WAIT = 10.0
"""Seconds a request may wait for its row to be read."""


ADVICE = (
    "start the oracle with the --seed, --set and --split of whoever asks, with a higher --limit, or with the file of"
    " its rows: --tasks FILE"
)
"""What helps where it knows no row that opens like a conversation, and how it was started is up to its user."""

SERVED = (
    "POST the row to /run of an agent with the oracle in its process (`gymsdk serve` without --separate and --role), or"
    " let `gymsdk policy serve oracle --env NAME` play, which takes --seed, --set, --split and --tasks of whoever asks"
)
"""What helps where it plays behind a model server, and reads all splits with the seed 0."""


class Oracle(ScriptedModel):
    """*model*, which plays episodes of *environments*, for those as well who bring a conversation alone.

    A conversation is answered as the first of *sources*' rows was that opens like it and went like it so far; one
    that none went like, by the model in an episode of such a row that has come as far. Rows are read as they are
    needed, at most *limit*, and a request waits for that at most *wait* seconds.
    """

    def __init__(
        self,
        model: Model,
        environments: Environments,
        sources: Sequence[Sourced],
        *,
        limit: int = LIMIT,
        seed: int = 0,
        wait: float = WAIT,
        advice: str = ADVICE,
    ) -> None:
        super().__init__(str(getattr(model, "name", NAMED)).removeprefix("scripted/"), self._said)
        self._model = model
        self._environments = environments
        self._recorder = Recorder(environments, model, sources, limit=limit, seed=seed)
        self._wait = wait
        self._advice = advice

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Leave the rows that are being read."""
        await self._recorder.aclose()

    async def _said(self, request: Item, episode: Episode | None) -> list[Item]:
        # An episode that is played against a server knows no more than its conversation.
        if episode is not None and hasattr(episode.environment, "solve"):
            return await self._asked(request, episode)
        history = recordings.get_input_items(request)
        found, marks = await self._found(request)
        turn = found.find_turn(marks[-1])
        if turn is not None:
            return found.get_turn(turn)
        starts = [*(span.start for span in iter_turn_spans(history)), len(history)]
        return await self._played(found, request, history[starts[marks.index(found.digests[0])] :])

    async def _found(self, request: Item) -> tuple[Recording, list[bytes]]:
        """Return the recording that *request* follows, once its row has been read, and the marks by which it does."""
        clock = asyncio.get_running_loop().time
        ends, conversation = clock() + self._wait, recordings.Conversation(request)
        while True:
            marks = conversation.find_digests(self._recorder.found)
            if marks is not None and (found := self._recorder.found.find_next_turn(marks)) is not None:
                return found[0], marks
            if self._recorder.over:
                raise self._unknown()
            if clock() >= ends:
                told = f"no row read so far opens like this conversation (read: {self._recorder.story})"
                told = f"{told}; ask again, or {self._advice}"
                raise Failed(told, kind="still_reading", retryable=True, retry_after=1.0)
            await self._recorder.more(ends - clock())

    async def _played(self, found: Recording, request: Item, items: Sequence[Item]) -> list[Item]:
        """Give what the model says in an episode of the row that has come as far as *items*."""
        environment = self._environments[found.environment]
        sitting = EpisodeRunner(environment, BUDGET)
        try:
            episode = await sitting.open(unpacked(found.row), seed=found.seed)
            await environment.replay_into(episode, items)
            if episode.done:
                raise Failed("the episode is over: a perfect policy has nothing more to say", kind="not_recorded")
            return await self._asked(request, episode)
        finally:
            await sitting.close()

    async def _asked(self, request: Item, episode: Episode) -> list[Item]:
        output: list[Item] = (await self._model.respond(request, episode=episode))["output"]
        return output

    def _unknown(self) -> Failed:
        return Failed(
            f"no row opens like this conversation (read: {self._recorder.story}); {self._advice}",
            kind="not_recorded",
        )


def served(model: Model, environments: Sequence[Environment]) -> Model:
    """Give *model* as a server of it can use it: one that needs an episode finds it among the rows of all splits."""
    if isinstance(model, Oracle) or not (isinstance(model, ScriptedModel) and model.name.startswith(NAMED)):
        return model
    named = {each.name: each for each in environments}
    return Oracle(model, named, of_splits(named), advice=SERVED)


@asynccontextmanager
async def opened(
    environments: Environments,
    model: Model,
    *,
    split: str | None = None,
    tasks: Path | None = None,
    limit: int | None = None,
    seed: int = 0,
) -> AsyncIterator[Oracle]:
    """Open the oracle over *environments*: the rows of all splits, of one *split*, or of the file *tasks*.

    Raises `UsageError` where there are none to be had.
    """
    one_source(tasks, split)
    sources = of_splits(environments, split, seed=seed) if tasks is None else of_file(environments, tasks)
    async with AsyncExitStack() as entered:
        for environment in environments.values():
            await entered.enter_async_context(environment)
        yield await entered.enter_async_context(Oracle(model, environments, sources, limit=limit or LIMIT, seed=seed))
