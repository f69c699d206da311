"""Play the jobs of a run: retries, concurrency, results on disk, and the end of a run without a model."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from gymsdk import Environment, Failed, load, responses
from gymsdk.errors import BadRow, ModelLost
from gymsdk.http.backoff import Backoff
from gymsdk.memory import NO_FULL_COLLECTION, YOUNG_COLLECTIONS, YOUNG_OBJECTS, collect_rarely
from gymsdk.models.scripted import ScriptedModel
from gymsdk.rollouts.folder import RunFolder
from gymsdk.rollouts.inputs import RunInputs
from gymsdk.rollouts.jobs import (
    MAX_FAILURES_BEFORE_FIRST_SCORE,
    MAX_RETRY_AFTER_SECONDS,
    MAX_UNAVAILABLE_IN_A_ROW,
    CircuitBreaker,
    Job,
    PlayedJob,
    build_input_row,
    iter_jobs,
    play_with_retries,
)
from gymsdk.rollouts.players import MAX_STARTS_PER_PASS, LocalPlayer, collect
from gymsdk.rollouts.run import play_missing, write_result
from gymsdk.rollouts.tasks import read_splits
from gymsdk.types import Episode, Failure, Item, Rollout, Row

FAILS_TWICE = """
tries = 0

@hookimpl
def step():
    global tries
    tries += 1
    if tries < 3:
        raise ValueError("not yet")
    return Step(done=True)

@hookimpl
def verify():
    return Verdict(reward=1.0)
"""


@pytest.fixture
async def sums(installed: Callable[..., Path]) -> AsyncIterator[Mapping[str, Environment]]:
    installed()
    async with load("sums") as environment:
        yield {"sums": environment}


@pytest.fixture
def folder(sums: Mapping[str, Environment], tmp_path: Path) -> Iterator[RunFolder]:
    rows = read_splits(sums, "train", seed=0, limit=3)
    inputs = [
        build_input_row(row, environment=name, task=number, sampling={}) for number, (name, row) in enumerate(rows)
    ]
    with RunFolder(tmp_path / "out") as folder:
        folder.start(settings={}, about={}, inputs=inputs)
        yield folder


def _failing_model(times: int, error: Exception) -> ScriptedModel:
    """Return a model that fails its first *times* calls with *error*, and then says `4`."""
    calls = 0

    async def choose(_request: Item, _episode: Episode | None) -> list[Item]:
        nonlocal calls
        calls += 1
        if calls <= times:
            raise error
        return [responses.build_message("4")]

    return ScriptedModel("failing", choose)


def _counted_model() -> ScriptedModel:
    """Return a model that reports 5 output tokens for every response."""

    class CountedModel(ScriptedModel):
        async def respond(self, request: Item, *, episode: Episode | None = None) -> Item:
            return {**await super().respond(request, episode=episode), "usage": {"output_tokens": 5}}

    async def choose(_request: Item, _episode: Episode | None) -> list[Item]:
        return [responses.build_message("4")]

    return CountedModel("counted", choose)


def _job(folder: RunFolder) -> Job:
    """Return the first job of the run in *folder*."""
    return next(iter_jobs(folder.read_inputs()))


async def _play_missing(folder: RunFolder, play: LocalPlayer, **options: Any) -> list[PlayedJob]:
    """Play the jobs of *folder* that have no result yet; *options* replace the default arguments."""
    jobs: list[PlayedJob] = []
    inputs = RunInputs(folder)
    await inputs.count_earlier_rows()
    defaults = {"done": folder.read_progress().done, "concurrency": 4, "report": jobs.append}
    await play_missing(folder, play, inputs=inputs, **{**defaults, **options})
    return jobs


async def test_every_rollout_is_on_disk_before_it_is_counted(
    sums: Mapping[str, Environment], folder: RunFolder
) -> None:
    on_disk = []

    def record(played: PlayedJob) -> None:
        on_disk.append(played.job.key in folder.read_progress().done)

    await _play_missing(folder, LocalPlayer(sums, _failing_model(0, ValueError())), report=record)
    assert on_disk == [True] * 3


async def test_only_missing_rollouts_are_played(sums: Mapping[str, Environment], folder: RunFolder) -> None:
    play = LocalPlayer(sums, _failing_model(0, ValueError()))
    first = await _play_missing(folder, play, done={(0, 0), (1, 0)})
    rest = await _play_missing(folder, play)
    assert [played.job.key for played in first] == [(2, 0)]
    assert {played.job.key for played in rest} == {(0, 0), (1, 0)}


BUSY = {"kind": "model_error", "retryable": True}


@pytest.mark.parametrize(
    ("failures", "allowed", "error", "expected"),
    [
        (2, 3, BUSY, (3, "scored")),
        (2, 2, BUSY, (2, "failed")),
        (9, 3, {"kind": "model_refused"}, (1, "failed")),
        (9, 3, BUSY | {"retry_after": MAX_RETRY_AFTER_SECONDS + 1}, (1, "failed")),
    ],
)
async def test_a_retryable_failure_is_retried_within_the_attempts(
    sums: Mapping[str, Environment],
    folder: RunFolder,
    failures: int,
    allowed: int,
    error: dict[str, Any],
    expected: tuple[int, str],
) -> None:
    model = _failing_model(failures, Failed("busy", **error))
    played = write_result(folder, await LocalPlayer(sums, model, attempts=allowed)(_job(folder)))
    assert (played.attempts, played.rollout.outcome) == expected
    failed = [stored.line for stored in folder.read_failures()]
    assert len(failed) == (played.rollout.outcome != "scored")
    for line in failed:
        assert played.rollout.reward is None
        assert (line["_ng_failure_class"], line["_ng_failure_stage"]) == (error["kind"], "model")
        assert (line["_ng_attempt_index"], line["_ng_failure_terminal"]) == (expected[0] - 1, False)


@pytest.mark.parametrize(
    ("kind", "attempts"), [("server_unreachable", 2), ("session_lost", 2), ("hook_raised", 1), ("worker_timeout", 1)]
)
async def test_a_rollout_whose_server_is_lost_during_verify_is_played_once_more(
    folder: RunFolder, kind: str, attempts: int
) -> None:
    failure = Failure(stage="verify", kind=kind, message="x", retryable=True)

    async def play_once(_job: Job, _attempt: int) -> Rollout:
        return _rollout().model_copy(update={"outcome": "failed", "failure": failure})

    assert (await play_with_retries(_job(folder), play_once, attempts=5)).attempts == attempts


async def test_tokens_of_every_attempt_are_counted(folder: RunFolder, environment: Callable[..., Environment]) -> None:
    fails_twice = environment(FAILS_TWICE)
    write_result(folder, await LocalPlayer({"sums": fails_twice}, _counted_model(), attempts=3)(_job(folder)))
    (stored,) = folder.read_rollouts()
    line = stored.line
    assert (line["gymsdk"]["attempts"], line["gymsdk"]["usage"]["policy"]["calls"]) == (3, 3)
    assert line["gymsdk"]["usage"]["policy"]["output_tokens"] == 15
    assert line["response"]["usage"]["output_tokens"] == 5


async def test_a_retry_waits_as_long_as_the_server_asks(
    sums: Mapping[str, Environment], folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gymsdk.rollouts.jobs.BACKOFF", Backoff(first=0.0))
    loop = asyncio.get_running_loop()
    error = Failed("busy", kind="model_rate_limited", retryable=True, retry_after=0.2)
    start_time = loop.time()
    played = await LocalPlayer(sums, _failing_model(1, error))(_job(folder))
    assert (played.rollout.outcome, played.attempts) == ("scored", 2)
    assert loop.time() - start_time >= 0.2


async def test_an_internal_error_fails_one_rollout_only(
    sums: Mapping[str, Environment], folder: RunFolder, caplog: pytest.LogCaptureFixture
) -> None:
    class BrokenEnvironment:
        name = "sums"

        def __getattr__(self, method: str) -> Any:
            return getattr(sums["sums"], method)

        async def reset(self, row: Item, *, id: str, **options: Any) -> Episode:
            if id == "1:0":
                raise KeyError("a bug")
            return await sums["sums"].reset(row, id=id, **options)

    results = await _play_missing(folder, LocalPlayer({"sums": BrokenEnvironment()}, _failing_model(0, ValueError())))
    assert sorted(played.rollout.outcome for played in results) == ["failed", "scored", "scored"]
    (stored,) = folder.read_failures()
    line = stored.line
    assert (line["_ng_failure_class"], line["_ng_failure_message"]) == ("host_broke", "KeyError: 'a bug'")
    assert (line["_ng_attempt_index"], line["_ng_failure_terminal"]) == (2, False)
    assert "Traceback" in caplog.text


async def test_a_row_that_no_longer_fits_the_environment_is_a_terminal_failure(
    sums: Mapping[str, Environment], folder: RunFolder
) -> None:
    job = Job("sums", 0, 0, {"responses_create_params": {"input": "?"}})
    write_result(folder, await LocalPlayer(sums, _failing_model(0, ValueError()))(job))
    (stored,) = folder.read_failures()
    line = stored.line
    assert (line["_ng_failure_class"], line["_ng_failure_terminal"]) == ("bad_row", True)


async def test_the_number_of_concurrent_rollouts_is_limited() -> None:
    running = max_running = 0

    async def play(job: Job) -> PlayedJob:
        nonlocal running, max_running
        running += 1
        max_running = max(max_running, running)
        await asyncio.sleep(0)
        running -= 1
        return PlayedJob(job, _rollout(), 1)

    source = (Job("sums", number, 0, {}) for number in range(50))
    assert len([played async for played in collect(source, play, concurrency=7)]) == 50
    assert max_running == 7


async def test_rollouts_start_in_several_passes_of_the_event_loop() -> None:
    passes: list[int] = []
    started = 0

    async def play(job: Job) -> PlayedJob:
        nonlocal started
        started += 1
        await asyncio.sleep(0.2)
        return PlayedJob(job, _rollout(), 1)

    async def count_starts() -> None:
        while True:
            before = started
            await asyncio.sleep(0)
            passes.append(started - before)

    counting = asyncio.ensure_future(count_starts())
    source = (Job("sums", number, 0, {}) for number in range(200))
    assert len([played async for played in collect(source, play, concurrency=200)]) == 200
    counting.cancel()
    assert 0 < max(passes) <= MAX_STARTS_PER_PASS


async def test_a_rollout_is_read_when_it_starts() -> None:
    read: list[int] = []

    def read_jobs() -> Iterator[Job]:
        for number in range(100):
            read.append(number)
            yield Job("sums", number, 0, {})

    async def play(job: Job) -> PlayedJob:
        return PlayedJob(job, _rollout(), 1)

    async with aclosing(collect(read_jobs(), play, concurrency=4)) as results:
        await anext(results)
    assert len(read) <= 2 * MAX_STARTS_PER_PASS


async def test_no_automatic_collection_traverses_all_objects_while_rollouts_are_played() -> None:
    thresholds: list[tuple[int, int, int]] = []

    async def play(job: Job) -> PlayedJob:
        thresholds.append(gc.get_threshold())
        return PlayedJob(job, _rollout(), 1)

    before = gc.get_threshold()
    assert [played async for played in collect([Job("sums", 0, 0, {})], play)]
    assert thresholds == [(YOUNG_OBJECTS, YOUNG_COLLECTIONS, NO_FULL_COLLECTION)]
    assert gc.get_threshold() == before


def test_rows_with_equal_tools_share_one_list() -> None:
    def build_row(number: int, names: list[str]) -> Row:
        params = {"input": "?", "tools": [{"type": "function", "name": name} for name in names]}
        return build_input_row({"responses_create_params": params}, environment="sums", task=number)

    rows = [build_row(number, ["add"] if number % 2 else ["add", "subtract"]) for number in range(4)]
    first, second, third, fourth = (job.row["responses_create_params"]["tools"] for job in iter_jobs(rows))
    assert first is third
    assert second is fourth
    assert [len(first), len(second)] == [2, 1]


async def test_closing_the_iterator_cancels_running_rollouts() -> None:
    started, cancelled = [], []

    async def play(job: Job) -> PlayedJob:
        started.append(job.task)
        try:
            await asyncio.sleep(job.task * 100)
        except asyncio.CancelledError:
            cancelled.append(job.task)
            raise
        return PlayedJob(job, _rollout(), 1)

    results = collect((Job("sums", number, 0, {}) for number in range(9)), play, concurrency=3)
    assert (await anext(results)).job.task == 0
    async with asyncio.timeout(30):
        while len(started) < 4:  # noqa: ASYNC110 - the collector reports a start in no other way
            await asyncio.sleep(0)
    await results.aclose()
    assert sorted(cancelled) == [1, 2, 3]


def _rollout(kind: str | None = None, *, stage: str = "model") -> Rollout:
    """Return a scored rollout, or a rollout that failed with *kind* in *stage*."""
    failure = Failure(stage=stage, kind=kind, message="no answer") if kind else None
    outcome, reward = ("failed", None) if kind else ("scored", 1.0)
    return Rollout(id="", environment="sums", row={}, seed=0, outcome=outcome, reward=reward, failure=failure)


def _record(breaker: CircuitBreaker, *rollouts: Rollout) -> None:
    for rollout in rollouts:
        breaker.record(rollout)


def test_an_unreachable_server_ends_the_run() -> None:
    breaker = CircuitBreaker(scored=1000)
    _record(breaker, *[_rollout("model_unreachable")] * (MAX_UNAVAILABLE_IN_A_ROW - 1))
    with pytest.raises(
        ModelLost, match=rf"{MAX_UNAVAILABLE_IN_A_ROW} rollouts failed for the same reason \(no answer\)"
    ):
        breaker.record(_rollout("model_unreachable"))


def test_only_a_model_that_never_answers_ends_the_run() -> None:
    streak = [_rollout("model_unreachable")] * (MAX_UNAVAILABLE_IN_A_ROW - 1)
    _record(CircuitBreaker(), *streak, _rollout(), *streak, _rollout("model_refused"), *streak)
    with pytest.raises(ModelLost):
        _record(CircuitBreaker(), *[_rollout("model_refused")] * MAX_FAILURES_BEFORE_FIRST_SCORE)
    _record(CircuitBreaker(scored=1), *[_rollout("model_refused")] * 500)
    _record(CircuitBreaker(), *[_rollout("hook_raised", stage="verify")] * 500)


async def test_an_error_of_the_source_is_raised_even_if_no_job_runs() -> None:
    def jobs() -> Iterator[Job]:
        raise BadRow("row 1: expected a JSON object")
        yield

    async def play(job: Job) -> PlayedJob:
        raise AssertionError(job)

    # A run begins with a garbage collection, which takes long in a process with many tests.
    with collect_rarely():
        for _ in range(50):
            with pytest.raises(BadRow, match="row 1"):
                async for _ in collect(jobs(), play):
                    pass
