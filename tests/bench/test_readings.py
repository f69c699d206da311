"""The metrics of servers before and after a load."""

from __future__ import annotations

from itertools import accumulate

import pytest

from gymsdk.bench.readings import LagReading, summarise_lag
from gymsdk.observability.loop_lag import BUSY_INTERVAL_SECONDS, LoopLagSampler


def read(sampler: LoopLagSampler) -> LagReading:
    return LagReading("sums", [*accumulate(sampler.counts)], sampler.longest)


def test_lag_before_the_load_does_not_count() -> None:
    sampler = LoopLagSampler()
    sampler.record(3.0)
    before = read(sampler)
    for _ in range(99):
        sampler.record(0.003)
    sampler.record(0.015)
    lag = summarise_lag(read(sampler), before)
    assert lag is not None
    assert lag.p50 == pytest.approx(3.0, rel=0.3)
    assert lag.max == pytest.approx(15.0, rel=0.3)


def test_a_new_maximum_is_exact_and_a_load_without_samples_has_no_lag() -> None:
    sampler = LoopLagSampler()
    sampler.record(0.01)
    before = read(sampler)
    assert summarise_lag(before, before) is None
    sampler.record(1.2345)
    for lag in (summarise_lag(read(sampler), before), summarise_lag(read(sampler), None)):
        assert lag is not None
        assert lag.max == 1234.5


def test_a_stall_weighs_as_much_as_the_time_that_it_takes() -> None:
    sampler = LoopLagSampler()
    for _ in range(50):
        sampler.record(0.0)
    # The stall takes as long as the 50 intervals before it.
    sampler.record(50 * BUSY_INTERVAL_SECONDS)
    lag = summarise_lag(read(sampler), None)
    assert lag is not None
    assert lag.p99 == pytest.approx(980.0, rel=0.1)
