"""Reference cycles are collected rarely, and never forgotten."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from gymsdk import Step, Verdict, hookimpl, play
from gymsdk.concurrency import timeout_at
from gymsdk.edge.limits import EpisodeSlots
from gymsdk.environment import Environment
from gymsdk.memory import (
    EPISODES_PER_CERTAIN_COLLECTION,
    EPISODES_PER_CHECK,
    EPISODES_PER_COLLECTION,
    FEW_EPISODES,
    MAX_EPISODES_WITH_COLLECTIONS,
    MIN_GROWTH_BYTES,
    EpisodeCounter,
    RareCollector,
    collect_rarely,
)
from gymsdk.rollouts.jobs import Job, PlayedJob
from gymsdk.rollouts.players import collect
from gymsdk.types import Model


class _Cycle:
    def __init__(self, size: int = 0) -> None:
        self.me = self
        self.data = b"x" * size


def _create_garbage(size: int = 0) -> weakref.ref[_Cycle]:
    return weakref.ref(_Cycle(size))


def _count_episodes(collector: RareCollector, count: int, *, in_flight: int) -> None:
    for _ in range(count):
        collector.end_episode(in_flight)


@pytest.mark.parametrize(
    ("size", "in_flight", "episodes"),
    [
        pytest.param(4 * MIN_GROWTH_BYTES, 1, EPISODES_PER_COLLECTION, id="grown memory"),
        pytest.param(0, 1, EPISODES_PER_CERTAIN_COLLECTION, id="without growth"),
        pytest.param(0, MAX_EPISODES_WITH_COLLECTIONS + 1, EPISODES_PER_CERTAIN_COLLECTION, id="many in flight"),
    ],
)
def test_a_collection_comes_after_a_number_of_episodes(size: int, in_flight: int, episodes: int) -> None:
    with collect_rarely() as collector:
        garbage = _create_garbage(size)
        _count_episodes(collector, episodes - 1, in_flight=in_flight)
        assert garbage() is not None
        _count_episodes(collector, 1, in_flight=in_flight)
        assert garbage() is None


@pytest.mark.parametrize("is_enabled", [True, False])
def test_the_automatic_collector_is_off_while_too_many_episodes_are_in_flight(is_enabled: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if is_enabled else gc.disable)()
        with collect_rarely() as collector:
            collector.begin_episode(MAX_EPISODES_WITH_COLLECTIONS)
            assert gc.isenabled() == is_enabled
            collector.begin_episode(MAX_EPISODES_WITH_COLLECTIONS + 1)
            assert not gc.isenabled()
            collector.end_episode(FEW_EPISODES + 1)
            assert not gc.isenabled()
            collector.end_episode(FEW_EPISODES)
            assert gc.isenabled() == is_enabled
            collector.begin_episode(MAX_EPISODES_WITH_COLLECTIONS + 1)
        assert gc.isenabled() == is_enabled
    finally:
        (gc.enable if before else gc.disable)()


@pytest.mark.parametrize("has_frozen", [False, True])
def test_only_objects_that_a_program_has_not_frozen_itself_are_unfrozen(has_frozen: bool) -> None:
    gc.unfreeze()
    if has_frozen:
        gc.freeze()
    try:
        with collect_rarely():
            assert gc.get_freeze_count() > 1000
        assert (gc.get_freeze_count() > 1000) == has_frozen
    finally:
        gc.freeze()


def test_growing_memory_causes_a_collection_however_many_episodes_are_in_flight() -> None:
    with collect_rarely(max_growth=16 * 2**20) as collector:
        garbage = _create_garbage(64 * 2**20)
        _count_episodes(collector, EPISODES_PER_CHECK, in_flight=16_384)
        assert garbage() is None


@contextmanager
def collecting() -> Iterator[None]:
    """Collect rarely, without the episodes of servers that other tests have not stopped."""
    gc.collect()
    with collect_rarely():
        yield


def check_that_none_counts() -> None:
    """Check that as many episodes may begin as leave the automatic collector on, and no more."""
    counter = EpisodeCounter()
    for _ in range(MAX_EPISODES_WITH_COLLECTIONS):
        counter.begin()
    assert gc.isenabled()
    counter.begin()
    assert not gc.isenabled()
    for _ in range(MAX_EPISODES_WITH_COLLECTIONS + 1):
        counter.end()
    assert gc.isenabled()


def test_the_episodes_of_all_servers_of_a_process_count_together() -> None:
    many, few = EpisodeCounter(), EpisodeCounter()
    with collecting():
        for _ in range(MAX_EPISODES_WITH_COLLECTIONS):
            many.begin()
        assert gc.isenabled()
        few.begin()
        assert not gc.isenabled()
        # The last episode of one server ends while those of another go on.
        few.end()
        assert not gc.isenabled()
        for _ in range(MAX_EPISODES_WITH_COLLECTIONS):
            many.end()
        assert gc.isenabled()


def test_the_episodes_of_a_server_that_was_not_stopped_do_not_count() -> None:
    with collecting():
        left = EpisodeCounter()
        for _ in range(MAX_EPISODES_WITH_COLLECTIONS + 1):
            left.begin()
        del left
        EpisodeCounter().begin()
        few = EpisodeCounter()
        few.begin()
        few.end()
        check_that_none_counts()


async def test_cancelled_episodes_do_not_count_any_more() -> None:
    slots, blocked = EpisodeSlots(2, 100), asyncio.Event()

    async def hold_slot() -> None:
        async with slots:
            await blocked.wait()

    async def play_forever(_: Job) -> PlayedJob:
        await blocked.wait()
        raise AssertionError

    with collecting():
        requests = [asyncio.ensure_future(hold_slot()) for _ in range(50)]
        jobs = [Job("counting", number, 0, {}) for number in range(50)]
        ends = collect(jobs, play_forever, concurrency=20)
        first = asyncio.ensure_future(anext(ends))
        await asyncio.sleep(0.05)
        for request in (*requests, first):
            request.cancel()
        await asyncio.wait([*requests, first])
        await ends.aclose()
        check_that_none_counts()


async def test_a_second_cancellation_while_the_episodes_end_forgets_none() -> None:
    may_end, jobs = asyncio.Event(), [Job("counting", number, 0, {}) for number in range(50)]

    async def end_slowly(_: Job) -> PlayedJob:
        try:
            await asyncio.sleep(60)
        finally:
            await may_end.wait()
        raise AssertionError

    async def collect_all() -> None:
        async for _ in collect(jobs, end_slowly, concurrency=20):
            pass

    with collecting():
        run = asyncio.ensure_future(collect_all())
        for _ in range(2):
            await asyncio.sleep(0.05)
            run.cancel()
        await asyncio.wait({run})
        may_end.set()
        check_that_none_counts()


async def test_an_episode_leaves_no_reference_cycle(policy: Callable[..., Model]) -> None:
    class Counting:
        @hookimpl
        async def step(self) -> Step:
            async with asyncio.timeout(60):
                await asyncio.sleep(0)
            return Step(reward=0.5, done=True)

        @hookimpl
        def verify(self) -> Verdict:
            return Verdict(reward=1.0)

    environment, row = Environment("counting", Counting()), {"responses_create_params": {"input": "count"}}

    async def play_one() -> None:
        with timeout_at(asyncio.get_running_loop().time() + 60):
            assert (await play(environment, policy("4"), row)).reward == 1.5

    await play_one()
    gc.collect()
    gc.disable()
    try:
        for _ in range(20):
            await play_one()
        # The collector's own state and the event loop's account for a few objects, whatever the number of episodes.
        assert gc.collect() < 20
    finally:
        gc.enable()
