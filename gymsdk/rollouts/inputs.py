"""The rows of a run: computed in a thread while the first ones are played, and found in `inputs.jsonl` afterwards."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Container, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO, Self

from gymsdk import jsonl
from gymsdk.concurrency import MAX_SLICE_SECONDS, ThreadIterator, yield_regularly
from gymsdk.errors import BadOutput, GymsdkError
from gymsdk.line import ROLLOUT_INDEX, TASK_INDEX, Key, read_index
from gymsdk.rollouts.folder import RunFolder
from gymsdk.rollouts.jobs import Job, JobBuilder
from gymsdk.types import Row
from gymsdk.working_folder import shorten_path

ROWS_BEFORE_START = 256
"""How many rows of a split are computed before the first episode. An error in them leaves the folder unchanged."""

MAX_CHUNK_ROWS = 64
"""How many rows are computed at most before they are written."""


def _parse(line: bytes, where: str) -> Row:
    return jsonl.parse_row(line, where=where)


class InputIndex(Mapping[int, Row]):
    """Finds rows as sent in `inputs.jsonl` and reads them one by one: a run may have a million.

    As a mapping, it has the first row of each task, by the index of the task. Rows without an index are left out.

    Args:
        path: The file.
        open_file: Opens the file.
        parse: Returns the row on a line that stands where its second argument says; raises `GymsdkError` or
            `ValueError` if there is none.
        on_error: Called with the number of a line that is no row, from 1, and the error. By default it is raised.

    Attributes:
        counts: The number of rows of each task.
    """

    def __init__(
        self,
        path: Path,
        *,
        open_file: Callable[[Path], IO[bytes]] = lambda path: path.open("rb"),
        parse: Callable[[bytes, str], Row] = _parse,
        on_error: Callable[[int, Exception], None] | None = None,
    ) -> None:
        self._path = path
        self._where = shorten_path(path)
        self._open = open_file
        self._parse = parse
        self._on_error = on_error
        self._first: dict[int, int] = {}
        self._others: dict[Key, int] = {}
        self.counts = Counter[int]()

    def read(self) -> Self:
        """Find the rows, and return the index."""
        with self._open(self._path) as file:
            offset = 0
            for number, line in enumerate(file, 1):
                offset += self._add(number, offset, line)
        return self

    async def read_in_turn(self) -> Self:
        """Find the rows while the event loop runs its other tasks, and return the index."""
        with self._open(self._path) as file:
            number = offset = 0
            async for line in yield_regularly(file):
                number += 1
                offset += self._add(number, offset, line)
        return self

    def find(self, task: int, repeat: int) -> Row | None:
        """Return the row of a rollout, or else the first row of its task, without the indices; `None` without one."""
        offset = self._others.get((task, repeat), self._first.get(task))
        if offset is None:
            return None
        row = self._read_row(offset)
        return {key: value for key, value in row.items() if key not in {TASK_INDEX, ROLLOUT_INDEX}}

    def __len__(self) -> int:
        return len(self._first)

    def __iter__(self) -> Iterator[int]:
        return iter(self._first)

    def __getitem__(self, task: int) -> Row:
        return self._read_row(self._first[task])

    def _add(self, number: int, offset: int, line: bytes) -> int:
        """Add the row on a *line*, and return the length of the line."""
        if line.strip():
            try:
                row = self._parse(line.removeprefix(jsonl.BOM) if not offset else line, f"{self._where}:{number}")
            except (GymsdkError, ValueError) as error:
                if self._on_error is None:
                    raise
                self._on_error(number, error)
                return len(line)
            task = row.get(TASK_INDEX)
            if type(task) is int:
                self.counts[task] += 1
                if self._first.setdefault(task, offset) != offset:
                    self._others.setdefault((task, read_index(row, ROLLOUT_INDEX, 0)), offset)
        return len(line)

    def _read_row(self, offset: int) -> Row:
        with self._open(self._path) as file:
            file.seek(offset)
            line = file.readline()
        return self._parse(line.removeprefix(jsonl.BOM) if not offset else line, str(self._where))


class RunInputs:
    """The rows of a run, in `inputs.jsonl`.

    If the folder lacks rows, *build_rows* computes them in a thread, a few at a time, in turns with the event loop. The
    loop writes them, so that after its end no thread changes the folder. The jobs are read from the file, as after a
    resume.

    Args:
        folder: The folder of the run.
        build_rows: Returns all rows of the run from the first on; `None` if the folder holds them all.

    Attributes:
        count: The number of rows in the folder.
        is_complete: Whether these are all rows.
    """

    def __init__(self, folder: RunFolder, build_rows: Callable[[], Iterator[Row]] | None = None) -> None:
        self._folder = folder
        self._chunks = None if build_rows is None else ThreadIterator(lambda: _join_lines(build_rows()))
        self._added = asyncio.Event()
        self._earlier: IO[bytes] | None = None
        self._earlier_bytes = 0
        self._error: BaseException | None = None
        self.count = 0
        self.is_complete = build_rows is None

    async def count_earlier_rows(self) -> None:
        """Count the rows that the folder holds. The first rows of *build_rows* must equal them.

        `write_rest` raises `BadOutput` if they do not.
        """
        self.count = await asyncio.to_thread(lambda: sum(1 for _ in jsonl.read_lines(self._folder.inputs)))
        if not self.is_complete:
            # `resume` has removed an incomplete last line.
            self._earlier_bytes = self._folder.inputs.stat().st_size
            self._earlier = self._folder.inputs.open("rb")

    async def write_first(self, count: int | None) -> None:
        """Write at least the first *count* rows, or all if there are fewer or if *count* is `None`."""
        while not self.is_complete and (count is None or self.count < count):
            await self._write_chunk()

    @asynccontextmanager
    async def write_rest(self, on_complete: Callable[[int], None]) -> AsyncIterator[None]:
        """Write the remaining rows while the block runs. An error is raised by the iterator of `iter_jobs`.

        Args:
            on_complete: Called with the number of all rows once they are written, unless they already are.
        """
        writing = asyncio.ensure_future(self._write_rest(on_complete))
        try:
            yield
        finally:
            writing.cancel()
            await asyncio.wait({writing})
            if self._earlier is not None:
                self._earlier.close()

    async def iter_jobs(self, *, done: Container[Key] = ()) -> AsyncIterator[Job]:
        """Yield the jobs in the order of the rows, except for the positions in *done*, and wait for further rows."""
        builder = JobBuilder()
        async for row in self._iter_rows():
            if (row[TASK_INDEX], row[ROLLOUT_INDEX]) not in done:
                yield builder.build(row)

    async def _iter_rows(self) -> AsyncIterator[Row]:
        # The iterator reads only rows that have been written, so it never reaches the end of a growing file.
        rows = yield_regularly(self._folder.read_inputs())
        for number in itertools.count():
            while number >= self.count and not self.is_complete and self._error is None:
                self._added.clear()
                await self._added.wait()
            if self._error is not None:
                raise self._error
            if number >= self.count:
                return
            yield await anext(rows)

    async def _write_rest(self, on_complete: Callable[[int], None]) -> None:
        if self.is_complete:
            return
        try:
            while not self.is_complete:
                await self._write_chunk()
            self._folder.finish_inputs()
            on_complete(self.count)
        except Exception as error:  # noqa: BLE001  # raised again by the iterator
            self._error = error
        finally:
            self._added.set()

    async def _write_chunk(self) -> None:
        assert self._chunks is not None, "there are rows to write"
        lines = await self._chunks.next_in_turn()
        if self._earlier is not None:
            lines = self._skip_earlier(lines)
        if lines is None:
            self.is_complete = True
        elif lines:
            self._folder.add_inputs(lines)
            self.count += lines.count(b"\n")
        self._added.set()

    def _skip_earlier(self, lines: bytes | None) -> bytes | None:
        """Return *lines* without the lines that the folder holds already."""
        assert self._earlier is not None
        # The file grows meanwhile.
        earlier = self._earlier.read(min(len(lines or b"") or 1, self._earlier_bytes))
        self._earlier_bytes -= len(earlier)
        if not (lines or b"").startswith(earlier):
            raise BadOutput(
                f"the environment no longer yields the rows in {self._folder.inputs}, so that the run cannot be"
                " continued; start over with --overwrite"
            )
        return lines if lines is None else lines[len(earlier) :]


def _join_lines(rows: Iterator[Row]) -> Iterator[bytes]:
    """Yield the lines of *rows* in chunks, which take `MAX_SLICE_SECONDS` to compute or have `MAX_CHUNK_ROWS` rows."""
    lines: list[bytes] = []
    ends_at = time.monotonic() + MAX_SLICE_SECONDS
    for row in rows:
        lines.append(jsonl.dump_row(row))
        if len(lines) == MAX_CHUNK_ROWS or time.monotonic() >= ends_at:
            yield b"".join(lines)
            lines.clear()
            ends_at = time.monotonic() + MAX_SLICE_SECONDS
    if lines:
        yield b"".join(lines)
