"""Reference cycles are collected rarely, and never forgotten."""

from __future__ import annotations

import gc
import weakref

from gymsdk.memory import (
    EPISODES_PER_CERTAIN_COLLECTION,
    EPISODES_PER_CHECK,
    EPISODES_PER_COLLECTION,
    MAX_EPISODES_IN_SHORT_COLLECTION,
    MIN_GROWTH_BYTES,
    RareCollector,
    collect_rarely,
)


class _Cycle:
    def __init__(self, size: int = 0) -> None:
        self.me = self
        self.data = b"x" * size


def _create_garbage(size: int = 0) -> weakref.ref[_Cycle]:
    return weakref.ref(_Cycle(size))


def _count_episodes(collector: RareCollector, count: int, *, in_flight: int) -> None:
    for _ in range(count):
        collector.count_episode(in_flight)


def test_few_episodes_in_flight_allow_a_collection_when_the_memory_has_grown() -> None:
    with collect_rarely() as collector:
        garbage = _create_garbage(2 * MIN_GROWTH_BYTES)
        _count_episodes(collector, EPISODES_PER_COLLECTION - 1, in_flight=1)
        assert garbage() is not None
        _count_episodes(collector, 1, in_flight=1)
        assert garbage() is None


def test_few_episodes_in_flight_allow_a_collection_without_growth_much_later() -> None:
    with collect_rarely() as collector:
        garbage = _create_garbage()
        _count_episodes(collector, EPISODES_PER_CERTAIN_COLLECTION - 1, in_flight=1)
        assert garbage() is not None
        _count_episodes(collector, 1, in_flight=1)
        assert garbage() is None


def test_many_episodes_in_flight_prevent_a_collection() -> None:
    with collect_rarely() as collector:
        garbage = _create_garbage()
        _count_episodes(collector, 2 * EPISODES_PER_COLLECTION, in_flight=MAX_EPISODES_IN_SHORT_COLLECTION + 1)
        assert garbage() is not None
    gc.collect()
    assert garbage() is None


def test_growing_memory_causes_a_collection_however_many_episodes_are_in_flight() -> None:
    with collect_rarely(max_growth=16 * 2**20) as collector:
        garbage = _create_garbage(64 * 2**20)
        _count_episodes(collector, EPISODES_PER_CHECK, in_flight=16_384)
        assert garbage() is None
