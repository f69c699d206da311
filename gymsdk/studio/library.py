"""The runs that the viewer shows: opened on demand, indexed in the background, and followed while they grow."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gymsdk.errors import GymsdkError
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
    """

    def __init__(self, key: str, source: RunSource) -> None:
        self.key = key
        self.source = source
        self.notes = RunNotes(source)
        self.is_watched = False
        self._lock = threading.Lock()
        self._index: RunIndex | None = None
        self._queries: RunQueries | None = None
        self._cache: dict[str, Any] = {}
        self._generation = 0

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
            if self._queries is None:
                self._queries = RunQueries(self.index)
                if sum(path.stat().st_size for path in self.source.files if path.exists()) <= MAX_BYTES_AT_ONCE:
                    # A larger run takes seconds, and is indexed in the background while the page shows its beginning.
                    self.index.update()
            self.is_watched = True
            yield self._queries

    def compute(self, key: str, build: Callable[[RunQueries], Any]) -> Any:
        """Return the result of *build*, which is kept under *key* until the run grows."""
        with self.use() as queries:
            if key not in self._cache:
                self._cache[key] = build(queries)
            return self._cache[key]

    def update(self) -> bool:
        """Index new lines; return whether there are any."""
        if not self.index.update():
            return False
        with self._lock:
            self._cache.clear()
            self._generation += 1
        return True

    def update_texts(self, seconds: float) -> bool:
        """Read texts for the search for some *seconds*; return whether all are read."""
        return self.index.update_texts(seconds)

    def build_state(self) -> Row:
        """Return the state that pages show of a growing run: the number of rollouts, and the searchable share."""
        with self.use() as queries:
            rollouts, scored, mean = queries.count_rewards()
            share = queries.get_searchable_share()
        return {
            "run": self.key,
            "generation": self._generation,
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
        self._paths = list(paths)
        self._folder = folder
        self._runs: dict[str, OpenRun] = {}
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._version = 0
        self._changed = threading.Condition()

    def list_runs(self) -> list[OpenRun]:
        """Return the runs, the newest first; runs that were started meanwhile are found."""
        sources = [find_run(path) for path in self._paths]
        if self._folder is not None:
            sources += [source for _, source in zip(range(MAX_RUNS), find_runs(self._folder), strict=False)]
        with self._lock:
            known = {run.source.path.resolve(): run for run in self._runs.values()}
            found = []
            for source in sources:
                run = known.get(source.path.resolve())
                if run is None:
                    run = OpenRun(self._choose_key(source), source)
                    self._runs[run.key] = run
                found.append(run)
        return found

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
        self._paths.append(path)
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
            for run in [each for each in list(self._runs.values()) if each.is_watched]:
                try:
                    changed = run.update()
                    with run.use() as queries:
                        waiting = queries.get_searchable_share() < 1
                    if waiting:
                        run.update_texts(TEXT_SECONDS)
                        changed = True
                except GymsdkError as error:
                    log.warning("%s: %s", run.source.path, error)
                    run.is_watched = False
                    continue
                if changed:
                    with self._changed:
                        self._version += 1
                        self._changed.notify_all()
                if self._stopped.is_set():
                    return

    def _choose_key(self, source: RunSource) -> str:
        name = "".join(each if each.isalnum() or each in "-_." else "-" for each in source.name) or "run"
        number, key = 1, name
        while key in self._runs:
            number += 1
            key = f"{name}-{number}"
        return key
