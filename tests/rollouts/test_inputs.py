"""The rows of a run are computed while its first episodes play, and a resume computes those that a kill prevented."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gymsdk import Rollout, Verdict
from gymsdk.concurrency import ThreadIterator, yield_regularly
from gymsdk.errors import BadOutput, BadRow
from gymsdk.rollouts import inputs as inputs_module
from gymsdk.rollouts.folder import RunFolder
from gymsdk.rollouts.inputs import ROWS_BEFORE_START, InputIndex, RunInputs
from gymsdk.rollouts.jobs import Job, PlayedJob, build_input_row
from gymsdk.rollouts.players import collect
from gymsdk.rollouts.summary import Summary, iter_metrics_json

COUNT = 4 * ROWS_BEFORE_START


@pytest.fixture(autouse=True)
def _one_row_per_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write the rows one by one: these take microseconds, and those of an environment milliseconds."""
    monkeypatch.setattr(inputs_module, "MAX_SLICE_SECONDS", 0.0)


def _rows(count: int = COUNT, *, answer: int = 4) -> Iterator[dict[str, Any]]:
    for task in range(count):
        row = {"responses_create_params": {"input": f"2 + 2 = ({task})"}, "answer": answer}
        yield build_input_row(row, environment="sums", task=task)


class HeldRows:
    """Rows of which the thread that computes them yields only some until it is released."""

    def __init__(self, before: int) -> None:
        self.released = threading.Event()
        self._before = before

    def __call__(self) -> Iterator[dict[str, Any]]:
        for number, row in enumerate(_rows()):
            if number == self._before:
                assert self.released.wait(30), "the episodes did not begin before all rows were computed"
            yield row


async def _play(job: Job) -> PlayedJob:
    rollout = Rollout(
        id=job.id, environment=job.environment, row=job.row, seed=0, outcome="scored", verdict=Verdict(reward=1.0)
    )
    return PlayedJob(job, rollout, 1)


async def _start(folder: RunFolder, inputs: RunInputs) -> None:
    await inputs.write_first(ROWS_BEFORE_START)
    folder.start(settings={}, about={"python": "3"}, complete=inputs.is_complete)


async def test_episodes_play_while_further_rows_are_computed(tmp_path: Path) -> None:
    rows, totals = HeldRows(2 * ROWS_BEFORE_START), []
    with RunFolder(tmp_path) as folder:
        inputs = RunInputs(folder, rows)
        await _start(folder, inputs)
        assert ROWS_BEFORE_START <= inputs.count < COUNT
        assert not folder.has_all_inputs
        played: list[int] = []
        async with inputs.write_rest(totals.append):
            async for ended in collect(inputs.iter_jobs(), _play, concurrency=4):
                played.append(ended.job.task)
                if len(played) == ROWS_BEFORE_START // 2:
                    assert not totals
                    rows.released.set()
        assert (sorted(played), totals, inputs.count) == ([*range(COUNT)], [COUNT], COUNT)
        assert folder.has_all_inputs
    written = [json.loads(line) for line in folder.inputs.read_bytes().splitlines()]
    assert written == [*_rows()]


async def _stop_early(path: Path) -> None:
    """Leave a run like one that was killed while it computed its rows, in the middle of a line."""
    with RunFolder(path) as folder:
        await _start(folder, RunInputs(folder, _rows))
    kept = folder.inputs.read_bytes()
    folder.inputs.write_bytes(kept[: len(kept) * 2 // 3])


async def test_a_resume_computes_the_rows_that_the_killed_run_had_not_written(tmp_path: Path) -> None:
    await _stop_early(tmp_path)
    with RunFolder(tmp_path) as folder:
        assert not folder.has_all_inputs
        folder.resume({}, repeats=1)
        inputs = RunInputs(folder, _rows)
        await inputs.count_earlier_rows()
        assert 0 < inputs.count < COUNT
        async with inputs.write_rest(lambda _: None):
            jobs = [job.task async for job in inputs.iter_jobs(done={(3, 0)})]
    assert jobs == [task for task in range(COUNT) if task != 3]
    assert [json.loads(line) for line in folder.inputs.read_bytes().splitlines()] == [*_rows()]
    assert folder.has_all_inputs


async def test_a_resume_refuses_rows_that_have_changed(tmp_path: Path) -> None:
    await _stop_early(tmp_path)
    with RunFolder(tmp_path) as folder:
        folder.resume({}, repeats=1)
        inputs = RunInputs(folder, lambda: _rows(answer=5))
        await inputs.count_earlier_rows()
        async with inputs.write_rest(lambda _: None):
            with pytest.raises(BadOutput, match="no longer yields the rows"):
                async for _ in inputs.iter_jobs():
                    pass


async def test_an_error_in_a_later_row_ends_the_run(tmp_path: Path) -> None:
    def rows() -> Iterator[dict[str, Any]]:
        yield from _rows(2 * ROWS_BEFORE_START)
        raise BadRow("row 512: expected a JSON object")

    with RunFolder(tmp_path) as folder:
        inputs = RunInputs(folder, rows)
        await _start(folder, inputs)
        async with inputs.write_rest(lambda _: None):
            with pytest.raises(BadRow, match="row 512"):
                async for _ in inputs.iter_jobs():
                    pass
        assert not folder.has_all_inputs


async def test_long_work_lets_the_event_loop_run_other_tasks() -> None:
    turns = 0

    async def take_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    other = asyncio.ensure_future(take_turns())
    total = 0
    async for number in yield_regularly(range(1_000_000)):
        total += number
    other.cancel()
    assert total == sum(range(1_000_000))
    assert turns > 3


def test_the_metrics_file_is_the_json_of_all_metrics(tmp_path: Path) -> None:
    inputs = tmp_path / "inputs.jsonl"
    inputs.write_text("".join(json.dumps(row) + "\n" for row in _rows(3)))
    samples = asyncio.run(InputIndex(inputs).read_in_turn())
    summaries = [Summary({"environment": name, "reward": 0.5, "note": "a\nb"}, [], samples) for name in ("one", "two")]
    for several in ([], summaries[:1], summaries):
        text = b"".join(iter_metrics_json(several))
        complete = [{**summary.metrics, "group_level_metrics": [*summary.iter_tasks()]} for summary in several]
        assert json.loads(text) == complete
        assert text.decode() == json.dumps(complete, indent=2) + "\n"


def test_the_row_of_a_task_is_read_when_it_is_needed(tmp_path: Path) -> None:
    inputs = tmp_path / "inputs.jsonl"
    again = build_input_row({"responses_create_params": {"input": "?"}}, environment="sums", task=1, repeat=1)
    rows = [*_rows(2), again]
    inputs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    samples = asyncio.run(InputIndex(inputs).read_in_turn())
    assert (len(samples), [*samples], samples.counts) == (2, [0, 1], {0: 1, 1: 2})
    assert samples[1] == rows[1]
    first, second = ({key: row[key] for key in row if "_index" not in key} for row in rows[1:])
    assert [samples.find(1, repeat) for repeat in (0, 1, 5)] == [first, second, first]
    assert samples.find(2, 0) is None


def _count_iterator_threads() -> int:
    return sum(thread.name == "gymsdk-iterator" for thread in threading.enumerate())


async def test_the_thread_of_an_iterator_ends_with_it_and_the_iterator_stays_at_its_end() -> None:
    iterator = ThreadIterator(lambda: [1, 2])
    before = _count_iterator_threads()
    assert [await iterator.next_in_turn() for _ in range(4)] == [1, 2, None, None]
    assert list(iterator) == []
    assert list(ThreadIterator(lambda: [1, 2])) == [1, 2]
    async with asyncio.timeout(30):
        while _count_iterator_threads() >= before:  # noqa: ASYNC110 - the end of a thread is no event
            await asyncio.sleep(0.01)


async def test_the_event_loop_goes_on_while_an_item_takes_long() -> None:
    released = threading.Event()

    def wait() -> Iterator[bool]:
        yield released.wait(30)

    iterator = ThreadIterator(wait)
    waiting = asyncio.ensure_future(iterator.next_in_turn())
    await asyncio.sleep(0.1)
    assert not waiting.done()
    released.set()
    assert await waiting is True


async def test_an_error_of_the_source_is_raised_and_ends_the_iteration() -> None:
    iterator = ThreadIterator(lambda: (1 // 0 for _ in range(2)))
    with pytest.raises(ZeroDivisionError):
        await iterator.next_in_turn()
    assert await iterator.next_in_turn() is None
