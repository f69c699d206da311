"""A run with rewritten files gives the new rewards, even if size or times stay the same."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from statistics import fmean

import pytest

from gymsdk.runs import Run, read, source
from gymsdk.runs.compare import compare
from gymsdk.runs.index import RunIndex
from gymsdk.runs.queries import RunQueries
from gymsdk.runs.source import find_run, get_default_path
from gymsdk.studio.app import describe_run
from gymsdk.studio.library import Library, OpenRun

COUNT = 30

OLD, NEW = [1.0] * COUNT, [1.0, *[0.0] * (COUNT - 2), 1.0]
"""Rewards that differ in neither the first nor the last line, which are longer than a block each."""

Rewrite = Callable[[Path, bytes], None]


def dump_lines(rewards: Sequence[float], *, padding: int = 5000, word: str = "apple") -> bytes:
    lines = [
        {
            "_ng_task_index": task,
            "_ng_rollout_index": 0,
            "responses_create_params": {"input": f"task {task} {word}"},
            "response": {"output": []},
            "reward": reward,
            "padding": "x" * padding,
        }
        for task, reward in enumerate(rewards)
    ]
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def read_rewards(path: Path) -> list[float]:
    """Return the rewards in a file by plain Python."""
    return [json.loads(line)["reward"] for line in path.read_text().splitlines()]


def list_rewards(run: Run) -> list[float]:
    return [row["reward"] for row in run.list_rows(limit=1000)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return the file of a run with the old rewards."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "rollouts.jsonl").write_bytes(dump_lines(OLD))
    return folder / "rollouts.jsonl"


def write_in_place(path: Path, content: bytes) -> None:
    with path.open("rb+") as file:
        file.write(content)


def write_in_place_with_old_times(path: Path, content: bytes) -> None:
    status = path.stat()
    write_in_place(path, content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def copy_with_times(path: Path, content: bytes) -> None:
    """Copy over the file with `cp -p` a file that was modified at the same time."""
    other, status = path.with_name("other"), path.stat()
    other.write_bytes(content)
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    subprocess.run(["cp", "-p", str(other), str(path)], check=True)


def replace(path: Path, content: bytes) -> None:
    other, status = path.with_name("other"), path.stat()
    other.write_bytes(content)
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.replace(path)


def remove_and_write(path: Path, content: bytes) -> None:
    path.unlink()
    path.write_bytes(content)


def remove_folder_and_write(path: Path, content: bytes) -> None:
    shutil.rmtree(path.parent)
    path.parent.mkdir()
    path.write_bytes(content)


def write_and_append(path: Path, content: bytes) -> None:
    with path.open("rb+") as file:
        file.write(content + dump_lines([0.5]))


REWRITES = [
    write_in_place,
    write_in_place_with_old_times,
    copy_with_times,
    replace,
    remove_and_write,
    remove_folder_and_write,
    write_and_append,
]


@pytest.fixture(params=REWRITES, ids=lambda rewrite: rewrite.__name__)
def rewrite(request: pytest.FixtureRequest) -> Rewrite:
    """Return one of the ways to rewrite a file."""
    found: Rewrite = request.param
    return found


def test_an_open_run_and_a_new_reader_give_the_new_rewards(path: Path, rewrite: Rewrite) -> None:
    with read(path.parent) as run:
        assert list_rewards(run) == OLD
        rewrite(path, dump_lines(NEW))
        run.update()
        assert list_rewards(run) == read_rewards(path)
        assert run.queries.count_rewards()[2] == pytest.approx(fmean(read_rewards(path)))
    with read(path.parent) as run:
        assert list_rewards(run) == read_rewards(path)
        assert run.arrow()["reward"].to_pylist() == read_rewards(path)


@pytest.mark.parametrize("rewrite", [write_in_place_with_old_times, replace, write_and_append])
def test_a_large_file_gives_the_new_rewards(path: Path, rewrite: Rewrite) -> None:
    path.write_bytes(dump_lines(OLD, padding=700_000))
    assert path.stat().st_size > 20_000_000
    with read(path.parent) as run:
        assert list_rewards(run) == OLD
    rewrite(path, dump_lines(NEW, padding=700_000))
    with read(path.parent) as run:
        if rewrite is write_and_append:
            # A large file that grows is hashed when it does not grow any more.
            run.update()
        assert list_rewards(run) == read_rewards(path)


@pytest.mark.parametrize("padding", [5000, 700_000])
def test_a_file_that_is_rewritten_within_one_tick_of_the_clock_gives_the_new_rewards(path: Path, padding: int) -> None:
    contents = [dump_lines(rewards, padding=padding) for rewards in (OLD, NEW)]
    with read(path.parent) as run:
        for number in range(40 if padding < 10_000 else 4):
            path.unlink()
            path.write_bytes(contents[number % 2])
            run.update()
            os.utime(path, ns=(0, 0))
            run.update()
            path.write_bytes(contents[1 - number % 2])
            os.utime(path, ns=(0, 0))
            run.update()
            assert list_rewards(run) == (OLD, NEW)[1 - number % 2]


def test_an_index_that_was_written_just_after_the_file_is_checked_later(path: Path) -> None:
    """The kernel's clock stands still during a tick, so that equal times prove nothing about a file that is new."""
    read(path.parent).close()
    index = get_default_path(find_run(path.parent))
    write_in_place(path, dump_lines(NEW))
    status = path.stat()
    with closing(sqlite3.connect(index)) as connection, connection:
        # As if the file had been rewritten in the tick in which it was indexed.
        connection.execute(
            "UPDATE file SET modified = ?, changed = ?, is_trusted = 0", (status.st_mtime_ns, status.st_ctime_ns)
        )
    with read(path.parent) as run:
        assert list_rewards(run) == NEW


def test_a_file_is_hashed_once_after_its_times_have_changed(path: Path) -> None:
    path.write_bytes(dump_lines(OLD, padding=700_000))
    with read(path.parent) as run:
        before = run.queries.get_progress()
        os.utime(path, ns=(0, 10**18))
        assert not run.update()
        [state] = run.queries._connection.execute("SELECT modified FROM file").fetchall()
        assert state["modified"] == 10**18
        assert run.queries.get_progress() == before
        assert run.index.verify()


def test_the_viewer_hashes_a_large_file_in_the_background_in_parts(path: Path) -> None:
    path.write_bytes(dump_lines(OLD, padding=700_000))
    index = RunIndex(find_run(path.parent))
    index.update()
    write_in_place_with_old_times(path, dump_lines(NEW, padding=700_000))
    assert not index.update_lines()
    parts = 0
    while not index.verify(seconds=0.0):
        parts += 1
        assert parts < 1000
    assert parts > 2
    assert index.update_lines()
    with closing(RunQueries(index)) as queries:
        assert [row["reward"] for row in queries.list_rows()] == NEW


def test_the_thread_of_the_viewer_finds_a_large_file_that_was_rewritten(path: Path) -> None:
    path.write_bytes(dump_lines(OLD, padding=700_000))
    library = Library([path.parent])
    [run] = library.list_runs()
    library.start()
    try:
        assert run.build_state()["mean"] == 1.0
        write_in_place_with_old_times(path, dump_lines(NEW, padding=700_000))
        deadline = time.monotonic() + 30
        while run.build_state()["mean"] != pytest.approx(fmean(NEW)):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        library.stop()


def test_what_was_kept_in_memory_is_read_again_if_another_process_has_indexed(path: Path) -> None:
    """`gymsdk rollout --view` and `gymsdk view` share an index, and either may index the new rewards."""
    viewed = OpenRun("run", find_run(path.parent))
    try:
        assert viewed.compute("summary", RunQueries.summarize)["mean"] == 1.0
        viewed.follow()
        generation = viewed.build_state()["generation"]
        with viewed.use() as queries:
            queries.index.update_texts()
            assert len(queries.search("apple")) == COUNT
        write_in_place(path, dump_lines(NEW, word="peach"))
        code = f"import gymsdk.runs; run = gymsdk.runs.read({str(path.parent)!r}); run.index.update_texts(); "
        code += "print(run.queries.summarize()['mean'])"
        mean = fmean(read_rewards(path))
        other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert float(other.stdout) == pytest.approx(mean)
        assert viewed.compute("summary", RunQueries.summarize)["mean"] == pytest.approx(mean)
        assert viewed.build_state()["generation"] > generation
        assert viewed.follow()
        assert not viewed.follow()
        with viewed.use() as queries:
            assert queries.search("apple") == []
            assert len(queries.search("peach")) == COUNT
    finally:
        viewed.close()


class TracedIndex(RunIndex):
    """Collects its SQL statements, and calls `before_write` before its first transaction."""

    def __init__(self, path: Path) -> None:
        self.statements: list[str] = []
        self.before_write: Callable[[], None] | None = None
        super().__init__(find_run(path))

    def connect(self) -> sqlite3.Connection:
        connection = super().connect()
        connection.set_trace_callback(self._trace)
        return connection

    def _trace(self, statement: str) -> None:
        self.statements.append(statement)
        if statement.startswith("BEGIN") and (work := self.before_write):
            self.before_write = None
            work()


@pytest.mark.parametrize("is_replaced", [False, True])
def test_an_index_does_not_forget_what_another_process_has_indexed_while_it_waited(
    path: Path, is_replaced: bool
) -> None:
    index, other = TracedIndex(path.parent), RunIndex(find_run(path.parent))
    index.update()

    def index_elsewhere() -> None:
        content = dump_lines(NEW)
        if is_replaced:
            path.rename(path.with_name("old"))
        path.write_bytes(content + dump_lines([0.5]))
        other.update_lines()

    with path.open("ab") as file:
        file.write(dump_lines([1.0], padding=10))
    index.before_write = index_elsewhere
    index.statements.clear()
    index.update_lines()
    assert not [statement for statement in index.statements if statement.startswith("DELETE FROM rollout")]
    with read(path.parent) as run:
        assert list_rewards(run) == read_rewards(path)


def test_a_comparison_pairs_the_tasks_of_rewritten_rows(path: Path, tmp_path: Path) -> None:
    other = shutil.copytree(path.parent, tmp_path / "other")
    rows = {"a": b"", "b": b""}
    for name in rows:
        rows[name] = b"".join(
            json.dumps({"_ng_task_index": task, "responses_create_params": {"input": f"{name}{task}"}}).encode() + b"\n"
            for task in range(COUNT)
        )
    for folder in (path.parent, other):
        (folder / "inputs.jsonl").write_bytes(rows["a"])
    with read(path.parent) as first, read(other) as second:
        assert len(compare(first.index, second.index).pairs) == COUNT
        write_in_place_with_old_times(other / "inputs.jsonl", rows["b"])
        assert compare(first.index, second.index).pairs == []
        write_in_place_with_old_times(other / "inputs.jsonl", rows["a"])
        write_in_place_with_old_times(other / "rollouts.jsonl", dump_lines(NEW))
        second.update()
        compared = compare(first.index, second.index)
        assert compared.overall is not None
        assert compared.overall.b == pytest.approx(fmean(NEW))


@pytest.mark.parametrize("content", [b"", b"not a database at all" * 100, b"SQLite format 3\0" + b"\0" * 5000])
def test_a_damaged_index_is_built_again(path: Path, content: bytes) -> None:
    index = get_default_path(find_run(path.parent))
    index.parent.mkdir(parents=True)
    index.write_bytes(content)
    with read(path.parent) as run:
        assert list_rewards(run) == OLD


def test_a_library_whose_index_was_removed_builds_it_again(path: Path) -> None:
    library = Library([path.parent])
    [run] = library.list_runs()
    try:
        assert run.compute("summary", RunQueries.summarize)["mean"] == 1.0
        for file in get_default_path(run.source).parent.iterdir():
            file.unlink()
        write_in_place(path, dump_lines(NEW))
        run.follow()
        assert run.compute("summary", RunQueries.summarize)["mean"] == pytest.approx(fmean(NEW))
    finally:
        library.stop()


def test_the_list_of_runs_has_the_rewards_that_were_written_after_the_metrics(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The changes of a test are too close to each other to be told from those of a copy.
    monkeypatch.setattr(source, "COPY_SECONDS", 0.0)
    rewards = [0.0, 1.0, 1.0, 1.0]
    path.write_bytes(dump_lines(rewards))
    metrics = [{"environment": "e", "outcomes": {"scored": 4}, "agent_metrics": {"mean/reward": 0.5}}]
    (path.parent / "metrics.json").write_text(json.dumps(metrics))
    run = OpenRun("run", find_run(path.parent))
    try:
        assert (describe_run(run)["scored"], describe_run(run)["mean"]) == (4, 0.5), "the metrics are current"
        time.sleep(0.02)
        write_in_place_with_old_times(path, dump_lines([*rewards, 1.0]))
        assert (describe_run(run)["scored"], describe_run(run)["mean"]) == (5, fmean([*rewards, 1.0]))
    finally:
        run.close()
