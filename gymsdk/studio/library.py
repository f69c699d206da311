"""The runs that the viewer shows: opened on demand, indexed in the background, and followed while they grow."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from gymsdk.errors import UsageError
from gymsdk.runs.compare import compare, to_json
from gymsdk.runs.index import RunIndex
from gymsdk.runs.notes import RunNotes
from gymsdk.runs.queries import RunQueries
from gymsdk.runs.source import RunSource, find_run, find_runs
from gymsdk.types import Row

POLL_SECONDS = 0.25
"""Seconds between two checks of the files of open runs for new lines."""

TEXT_SECONDS = 0.5
"""How long the background thread reads texts for the search before it looks for new lines again."""

VERIFY_SHARE = 0.02
"""The share of the time in which the background thread hashes the large files of a run that grows."""

MAX_BYTES_AT_ONCE = 50_000_000
"""The size of a run up to which a request waits until it is indexed."""

MAX_RUNS = 500
"""The most runs that are listed."""

log = logging.getLogger("gymsdk")


class OpenRun:
    """A run with its index, opened by the first request that needs it.

    Args:
        key: The name of the run in addresses.
        source: Its files.

    Attributes:
        error: Why the run could not be followed at the last try; empty if it could.
    """

    def __init__(self, key: str, source: RunSource) -> None:
        self.key = key
        self.source = source
        self.notes = RunNotes(source)
        self.is_watched = False
        self.error = ""
        self._lock = threading.Lock()
        self._index: RunIndex | None = None
        self._queries: RunQueries | None = None
        self._cache: dict[str, Any] = {}
        self._cached_at = 0
        self._progress = (0, 0)
        self._verify_at = 0.0
        self._verify_seconds = 0.0

    @property
    def index(self) -> RunIndex:
        """The index; created by the first use."""
        if self._index is None:
            self._index = RunIndex(self.source)
        return self._index

    @contextmanager
    def use(self) -> Iterator[RunQueries]:
        """Give the queries to one thread at a time."""
        with self._lock:
            self.is_watched = True
            if self._queries is not None and not self._queries.is_current:
                # Someone has removed the index.
                self._queries.close()
                self._queries = None
            if self._queries is None:
                if sum(map(_measure, self.source.files)) <= MAX_BYTES_AT_ONCE:
                    # A larger run takes seconds, and is indexed in the background while the page shows its beginning.
                    self.index.update()
                self._queries = RunQueries(self.index)
            yield self._queries

    def compute(self, key: str, build: Callable[[RunQueries], Any]) -> Any:
        """Return the result of *build*, which is kept under *key* until a process changes the index."""
        with self.use() as queries:
            generation, _ = queries.get_progress()
            if generation != self._cached_at:
                self._cache.clear()
                self._cached_at = generation
            if key not in self._cache:
                self._cache[key] = build(queries)
            return self._cache[key]

    def update(self) -> None:
        """Bring the index up to date."""
        self.index.update()

    def follow(self) -> bool:
        """Index new lines, and for a short time hash rewritten files and read texts for the search.

        Returns:
            Whether this or another process has changed the index since the last call.
        """
        if self.index.update_lines():
            self._rest()
        elif time.monotonic() > self._verify_at:
            self._verify()
        with self.use() as queries:
            waiting = queries.get_searchable_share() < 1
        if waiting:
            self.index.update_texts(TEXT_SECONDS)
        with self.use() as queries:
            earlier, self._progress = self._progress, queries.get_progress()
        return self._progress != earlier

    def _verify(self) -> None:
        """Hash large files that may have been rewritten for a short time."""
        started = time.monotonic()
        is_done = self.index.verify(TEXT_SECONDS)
        self._verify_seconds += time.monotonic() - started
        if is_done:
            self._rest()

    def _rest(self) -> None:
        """Hash nothing for a while: a file that grows again would be hashed again from its beginning."""
        self._verify_at = time.monotonic() + self._verify_seconds * (1 / VERIFY_SHARE - 1)
        self._verify_seconds = 0.0

    def count_rewards(self) -> tuple[int, float | None]:
        """Return the number and the mean of the rewards on the lines of the run."""
        with self.use() as queries:
            _, scored, mean = queries.count_rewards()
        return scored, mean

    def build_state(self) -> Row:
        """Return the state that pages show of a growing run: the number of rollouts, and the searchable share."""
        with self.use() as queries:
            rollouts, scored, mean = queries.count_rewards()
            share = queries.get_searchable_share()
            generation, _ = queries.get_progress()
        return {
            "run": self.key,
            "generation": generation,
            "rollouts": rollouts,
            "scored": scored,
            "mean": mean,
            "indexed": share,
            "is_finished": bool(self.source.read_metrics()),
        }

    def close(self) -> None:
        """Close the index."""
        with self._lock:
            if self._queries is not None:
                self._queries.close()
                self._queries = None


class Library:
    """The runs of the viewer, and the thread that indexes them.

    Args:
        paths: The runs; without any, all runs below *folder*.
        folder: Where runs are looked for.
    """

    def __init__(self, paths: Sequence[Path] = (), folder: Path | None = None) -> None:
        self._sources = {path: find_run(path) for path in paths}
        self._folder = folder
        self._runs: dict[str, OpenRun] = {}
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._version = 0
        self._changed = threading.Condition()

    def list_runs(self) -> list[OpenRun]:
        """Return the runs, the newest first; runs that were started meanwhile are found."""
        for path in list(self._sources):
            # A run that cannot be found any more must not hide the others; its description has the error.
            with suppress(UsageError):
                self._sources[path] = find_run(path)
        sources = list(self._sources.values())
        if self._folder is not None:
            sources += [source for _, source in zip(range(MAX_RUNS), find_runs(self._folder), strict=False)]
        with self._lock:
            # By resolved path, so that a run that two paths name is listed once.
            known = {run.source.path.resolve(): run for run in self._runs.values()}
            runs = []
            for source in sources:
                run = known.get(source.path.resolve())
                if run is None:
                    run = OpenRun(self._choose_key(source), source)
                    self._runs[run.key] = run
                runs.append(run)
        return runs

    def get(self, key: str) -> OpenRun | None:
        """Return the run with this key."""
        if key not in self._runs:
            self.list_runs()
        return self._runs.get(key)

    def add(self, path: Path) -> OpenRun:
        """Return the run at *path*, which is listed from now on."""
        source = find_run(path)
        for run in self.list_runs():
            if run.source.path.resolve() == source.path.resolve():
                return run
        self._sources[path] = source
        with self._lock:
            run = OpenRun(self._choose_key(source), source)
            self._runs[run.key] = run
        return run

    def compare(self, first: OpenRun, second: OpenRun) -> Row:
        """Return the comparison of two runs as JSON, with the ids of the first rollouts of each task."""
        for run in (first, second):
            run.is_watched = True
            run.update()
        return to_json(compare(first.index, second.index))

    def start(self) -> None:
        """Start the background thread."""
        self._thread = threading.Thread(target=self._work, name="gymsdk-view-index", daemon=True)
        self._thread.start()

    def interrupt(self) -> None:
        """End what waits for changes, such as the streams of events, and the background thread soon."""
        self._stopped.set()
        with self._changed:
            self._changed.notify_all()

    def stop(self) -> None:
        """Stop the background thread, and close the runs."""
        self.interrupt()
        if self._thread is not None:
            self._thread.join()
        for run in self._runs.values():
            run.close()

    @property
    def version(self) -> int:
        """A number that grows with every change."""
        return self._version

    @property
    def is_stopped(self) -> bool:
        """Whether the library is closed."""
        return self._stopped.is_set()

    def wait(self, version: int, seconds: float) -> int:
        """Wait until the version differs from *version*, at most some *seconds*, and return it."""
        with self._changed:
            self._changed.wait_for(lambda: self._version != version or self.is_stopped, seconds)
            return self._version

    def _work(self) -> None:
        while not self._stopped.wait(POLL_SECONDS):
            # A copy: a request may add a run meanwhile.
            for run in [run for run in list(self._runs.values()) if run.is_watched]:
                if self._follow(run):
                    with self._changed:
                        self._version += 1
                        self._changed.notify_all()
                if self._stopped.is_set():
                    return

    def _follow(self, run: OpenRun) -> bool:
        """Follow a run, and return whether there is something new to show; an error is logged once."""
        try:
            changed, error = run.follow(), ""
        except Exception as raised:  # noqa: BLE001  # the thread must continue with the other runs, and try again
            changed, error = False, str(raised) or type(raised).__name__
        if error and error != run.error:
            log.warning("%s: %s", run.source.path, error)
        changed |= error != run.error
        run.error = error
        return changed

    def _choose_key(self, source: RunSource) -> str:
        name = (
            "".join(character if character.isalnum() or character in "-_." else "-" for character in source.name)
            or "run"
        )
        number, key = 1, name
        while key in self._runs:
            number += 1
            key = f"{name}-{number}"
        return key


def _measure(path: Path) -> int:
    """Return the size of a file, 0 if there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0
