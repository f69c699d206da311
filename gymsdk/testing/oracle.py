"""The oracle for clients that send a conversation without an episode: it finds the row that opens in the same way."""

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
from gymsdk.concurrency import ThreadPool
from gymsdk.environment import Environment
from gymsdk.episode import EpisodeRunner, build_request
from gymsdk.errors import BadRow, Failed, GymsdkError, UnknownSplit
from gymsdk.line import compute_seed
from gymsdk.models import recordings
from gymsdk.models.recordings import Recording, RecordingStore
from gymsdk.models.scripted import ScriptedModel
from gymsdk.responses import get_input_items, iter_turn_spans
from gymsdk.rollouts.tasks import Environments, NamedRows, check_one_source, read_file, read_splits
from gymsdk.types import Budget, Episode, Item, Model, Row

DEFAULT_MAX_ROWS = 10_000
"""How many rows are read by default."""

MAX_RECORDING_BYTES = 256 * 1024**2
"""Bytes of recordings after which no more rows are read."""

BATCH_ROWS = 8
"""How many rows are read and played concurrently."""

READ_SECONDS = 60.0
"""Seconds that an environment may take to yield one batch of rows."""

MIN_ROWS_TO_COMPARE = 500
"""How many rows are read before a request is rejected because its tools differ from those of all rows."""

BUDGET = Budget(seconds=60.0)
"""The limits of playing one row."""

log = logging.getLogger("gymsdk")


def read_all_splits(environments: Environments, split: str | None = None, *, seed: int = 0) -> list[NamedRows]:
    """Return the rows of all splits of *environments*, or of one; raises `UnknownSplit` if none has it."""
    chosen = [
        read_splits({name: environment}, named_split, seed=seed, limit=None)
        for name, environment in environments.items()
        for named_split in environment.splits
        if split in {None, named_split}
    ]
    if split is not None and not chosen:
        raise UnknownSplit(f"no split {split!r} in {', '.join(environments)}; `gymsdk info NAME` lists the splits")
    return chosen


def read_tasks_file(environments: Environments, path: Path) -> list[NamedRows]:
    """Return the rows of a task file that are valid for one of *environments*; raises `BadRow` if there is none."""

    def log_skipped(error: BadRow) -> None:
        log.warning("skipped: %s", error)

    rows = read_file(environments, path, limit=None, bad=log_skipped)
    first = list(islice(rows, 1))
    if not first:
        raise BadRow(f"{path} holds no valid row for {' or '.join(environments)}; name another file with --tasks")
    return [chain(first, rows)]


class _SeededRow(NamedTuple):
    """A row, its environment, and the seed of its episode."""

    environment: str
    row: Row
    seed: int


class Recorder:
    """Plays rows with a model and records the conversations.

    An invalid row or source does not raise; `story` reports the last one.

    Args:
        environments: The environments by name.
        model: The model that plays.
        sources: The sources of rows, read in turn.
        limit: The most rows to play.
        seed: The seed of the episodes.
    """

    def __init__(
        self,
        environments: Environments,
        model: Model,
        sources: Sequence[NamedRows],
        *,
        limit: int = DEFAULT_MAX_ROWS,
        seed: int = 0,
    ) -> None:
        self.found = RecordingStore()
        self._environments = environments
        self._model = model
        self._sources: list[Iterator[_SeededRow]] = [_add_seeds(source, seed) for source in sources]
        self._turn = 0
        self._left = limit
        self._size = 0
        self._read: Counter[str] = Counter(dict.fromkeys(environments, 0))
        self._trouble = ""
        self._tools: set[frozenset[str]] = set()
        self._threads = ThreadPool(limit=1)
        self._batch: asyncio.Task[None] | None = None

    @property
    def is_complete(self) -> bool:
        """Whether all rows that may be played have been played."""
        under_way = self._batch is not None and not self._batch.done()
        return not under_way and (not self._sources or self._left <= 0 or self._size >= MAX_RECORDING_BYTES)

    @property
    def describe_progress(self) -> str:
        """How many rows have been read, and what failed last."""
        read = ", ".join(f"{count:,} of {name}" for name, count in self._read.items())
        return f"{read}{f'; the last error: {self._trouble}' if self._trouble else ''}"

    def offers_other_tools(self, request: Item) -> bool:
        """Return whether enough rows have been read to see that the tools of *request* are those of none of them."""
        if self._read.total() < MIN_ROWS_TO_COMPARE:
            return False
        names = _get_tool_names(request)
        return all(names.isdisjoint(tools) for tools in self._tools) if names else all(self._tools)

    async def wait_for_more(self, seconds: float) -> None:
        """Play the next batch, shared by all concurrent callers; wait at most *seconds*."""
        if self._batch is None or self._batch.done():
            self._batch = asyncio.ensure_future(self._record_all())
        done, _ = await asyncio.wait({self._batch}, timeout=seconds)
        for batch in done:
            batch.result()

    async def aclose(self) -> None:
        """Cancel the batch in progress."""
        if self._batch is not None:
            self._batch.cancel()
            await asyncio.wait({self._batch})

    async def _record_all(self) -> None:
        rows = await self._read_batch()
        self._left -= len(rows)
        async with asyncio.TaskGroup() as group:
            playing = [group.create_task(self._record(seeded_row)) for seeded_row in rows]
        for recording in (task.result() for task in playing):
            if recording is not None and self.found.is_new(recording):
                self._size += recording.size
                self.found.add(recording)

    async def _read_batch(self) -> list[_SeededRow]:
        # Reading runs the environment's code, which may block: the event loop must stay free.
        try:
            return await self._threads.run(self._take_rows, min(BATCH_ROWS, self._left), timeout=READ_SECONDS)
        except TimeoutError:
            self._sources, self._trouble = [], f"reading {BATCH_ROWS} rows takes more than {READ_SECONDS:g} s"
            return []

    def _take_rows(self, count: int) -> list[_SeededRow]:
        """Take the next *count* rows, one from each source in turn."""
        rows: list[_SeededRow] = []
        while self._sources and len(rows) < count:
            index = self._turn % len(self._sources)
            try:
                rows.append(next(self._sources[index]))
                self._turn = index + 1
            except (StopIteration, GymsdkError) as error:
                self._trouble = str(error) or self._trouble
                del self._sources[index]
                self._turn = index
        return rows

    async def _record(self, seeded: _SeededRow) -> Recording | None:
        name = seeded.environment
        try:
            recording = await record_episode(self._environments[name], self._model, seeded.row, seed=seeded.seed)
        except GymsdkError as error:
            self._trouble = f"{name}: {error}"
            return None
        self._read[name] += 1
        self._tools.add(recording.tools)
        return recording


async def record_episode(environment: Environment, model: Model, row: Row, *, seed: int) -> Recording:
    """Record what *model* says in an episode of *row*, without scoring it; raises `GymsdkError`."""
    runner, digests, turns, opening = EpisodeRunner(environment, BUDGET), [], [], None
    tools: frozenset[str] = frozenset()
    try:
        episode = await runner.open(row, seed=seed)
        while not runner.is_over:
            request = build_request(episode, {})
            tools |= _get_tool_names(request)
            response = await model.respond(request, episode=episode)
            history, instructions = get_input_items(request), request.get("instructions")
            digests.append(recordings.compute_digests(history, instructions)[-1])
            opening = opening or recordings.compute_openings(history, instructions)[-1]
            turns.append(response["output"])
            await runner.apply_response(response)
    finally:
        await runner.close()
    played = recordings.build_recording(digests, turns, opening)
    return replace(played, environment=environment.name, row=compress_row(row), seed=seed, tools=tools)


def _get_tool_names(request: Item) -> frozenset[str]:
    return frozenset(str(tool.get("name")) for tool in request.get("tools") or ())


def compress_row(row: Row) -> bytes:
    """Compress *row*."""
    return zlib.compress(jsonl.dump_portable_json(row), 1)


def decompress_row(row: bytes) -> Row:
    """Return the row that `compress_row` compressed."""
    return jsonl.parse_row(zlib.decompress(row), where="a recording")


def _add_seeds(source: NamedRows, seed: int) -> Iterator[_SeededRow]:
    """Yield rows with the seeds that `gymsdk rollout` gives them."""
    for number, (name, row) in enumerate(source):
        yield _SeededRow(name, row, compute_seed(seed, name, number))


NAMED = "scripted/oracle"
"""The prefix of the names of models that need an episode."""

WAIT = 10.0
"""Seconds that a request waits for its row to be read."""


ADVICE = (
    "start the oracle with the --env, --seed, --set and --split of the client, with a higher --limit, or with the file"
    " of its rows: --tasks FILE"
)
"""What to do if no row opens like a conversation, for an oracle that the user started."""

MODEL_SERVER_ADVICE = (
    "POST the row to /run of an agent with the oracle in its process (`gymsdk serve` without --separate and --role), or"
    " use `gymsdk policy serve oracle --env NAME`, which takes the --seed, --set, --split and --tasks of the client"
)
"""What to do for an oracle behind a model server, which reads all splits with the seed 0."""


class Oracle(ScriptedModel):
    """Answers clients that send a conversation without an episode, with a model that needs the episode.

    A conversation is answered as in the recording of the first row that opens like it and continued like it so far. If
    no recording continued like it, the model plays an episode of such a row, replayed to the same point.

    Args:
        model: The model that needs the episode.
        environments: The environments by name.
        sources: The sources of rows, read as far as requests need them.
        limit: The most rows to read.
        seed: The seed of the episodes.
        wait: The most seconds that a request waits for its row.
        advice: What to do if no row opens like the conversation, for the error message.
    """

    def __init__(
        self,
        model: Model,
        environments: Environments,
        sources: Sequence[NamedRows],
        *,
        limit: int = DEFAULT_MAX_ROWS,
        seed: int = 0,
        wait: float = WAIT,
        advice: str = ADVICE,
    ) -> None:
        super().__init__(str(getattr(model, "name", NAMED)).removeprefix("scripted/"), self._respond)
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
        """Stop reading rows."""
        await self._recorder.aclose()

    async def _respond(self, request: Item, episode: Episode | None) -> list[Item]:
        # The episode of a remote environment offers no more than its conversation.
        if episode is not None and hasattr(episode.environment, "solve"):
            return await self._ask_model(request, episode)
        history = get_input_items(request)
        found, marks = await self._find_recording(request)
        turn = found.find_turn(marks[-1])
        if turn is not None:
            return found.get_turn(turn)
        starts = [*(span.start for span in iter_turn_spans(history)), len(history)]
        return await self._replay(found, request, history[starts[marks.index(found.digests[0])] :])

    async def _find_recording(self, request: Item) -> tuple[Recording, list[bytes]]:
        """Return the recording that continues *request*, once its row has been read, and the digests of its turns."""
        clock = asyncio.get_running_loop().time
        ends, conversation = clock() + self._wait, recordings.Conversation(request)
        while True:
            marks = conversation.find_digests(self._recorder.found)
            if marks is not None and (recorded_turn := self._recorder.found.find_next_turn(marks)) is not None:
                return recorded_turn[0], marks
            if self._recorder.offers_other_tools(request):
                raise self._build_other_tools_error(request)
            if self._recorder.is_complete:
                raise self._build_unknown_error()
            if clock() >= ends:
                message = f"no row read so far opens like this conversation (read: {self._recorder.describe_progress})"
                message = f"{message}; repeat the request, or {self._advice}"
                raise Failed(message, kind="still_reading", retryable=True, retry_after=1.0)
            await self._recorder.wait_for_more(ends - clock())

    async def _replay(self, found: Recording, request: Item, items: Sequence[Item]) -> list[Item]:
        """Return what the model says in an episode of the recorded row, replayed up to *items*."""
        environment = self._environments[found.environment]
        runner = EpisodeRunner(environment, BUDGET)
        try:
            episode = await runner.open(decompress_row(found.row), seed=found.seed)
            await environment.replay_into(episode, items)
            if episode.done:
                raise Failed("the episode is over: the oracle has nothing more to say", kind="not_recorded")
            return await self._ask_model(request, episode)
        finally:
            await runner.close()

    async def _ask_model(self, request: Item, episode: Episode) -> list[Item]:
        output: list[Item] = (await self._model.respond(request, episode=episode))["output"]
        return output

    def _build_other_tools_error(self, request: Item) -> Failed:
        names = ", ".join(sorted(_get_tool_names(request)))
        difference = f"the tools {names}, and no row does" if names else "no tools, and every row does"
        return Failed(
            f"this conversation offers {difference} (read: {self._recorder.describe_progress}); {self._advice}",
            kind="not_recorded",
        )

    def _build_unknown_error(self) -> Failed:
        return Failed(
            f"no row opens like this conversation (read: {self._recorder.describe_progress}); {self._advice}",
            kind="not_recorded",
        )


def prepare_model(model: Model, environments: Sequence[Environment]) -> Model:
    """Return *model*, or an `Oracle` over the rows of all splits if the model needs an episode."""
    if isinstance(model, Oracle) or not (isinstance(model, ScriptedModel) and model.name.startswith(NAMED)):
        return model
    named = {environment.name: environment for environment in environments}
    return Oracle(model, named, read_all_splits(named), advice=MODEL_SERVER_ADVICE)


@asynccontextmanager
async def open_oracle(
    environments: Environments,
    model: Model,
    *,
    split: str | None = None,
    tasks: Path | None = None,
    limit: int | None = None,
    seed: int = 0,
) -> AsyncIterator[Oracle]:
    """Open an `Oracle` over the rows of all splits, of one *split*, or of the file *tasks*.

    Raises:
        UsageError: There are no such rows.
    """
    check_one_source(tasks, split)
    sources = read_all_splits(environments, split, seed=seed) if tasks is None else read_tasks_file(environments, tasks)
    async with AsyncExitStack() as entered:
        for environment in environments.values():
            await entered.enter_async_context(environment)
        yield await entered.enter_async_context(
            Oracle(model, environments, sources, limit=limit or DEFAULT_MAX_ROWS, seed=seed)
        )
