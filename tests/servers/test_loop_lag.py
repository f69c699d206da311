"""The lag of the event loop in a server's metrics."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left

import pytest

from gymsdk import testing
from gymsdk.http import client
from gymsdk.models.scripted import ScriptedModel
from gymsdk.observability.loop_lag import (
    BUSY_INTERVAL_SECONDS,
    LAG_BUCKET_SECONDS,
    LoopLagSampler,
    sample_loop_lag,
)
from gymsdk.observability.metrics import ServerMetrics, parse_samples
from gymsdk.responses import build_message


async def test_a_blocked_loop_is_recorded_with_its_length() -> None:
    metrics = ServerMetrics("made")
    metrics.in_flight = 1
    with sample_loop_lag(metrics) as sampler:
        await asyncio.sleep(0)
        time.sleep(0.3)  # noqa: ASYNC251  # the test blocks the loop on purpose
        await asyncio.sleep(0.05)
    assert sampler.longest >= 0.3 - BUSY_INTERVAL_SECONDS


async def test_servers_of_one_loop_share_a_sampler_that_ends_with_the_last() -> None:
    one, other = ServerMetrics("one"), ServerMetrics("other")
    with sample_loop_lag(one) as first:
        with sample_loop_lag(other) as second:
            assert first is second
        assert first.servers == [one]
    with sample_loop_lag(one) as later:
        assert later is not first


async def test_a_request_makes_the_idle_timer_fast_at_once() -> None:
    metrics = ServerMetrics("made")
    with sample_loop_lag(metrics) as sampler:
        metrics.start_request()
        await asyncio.sleep(0)
        time.sleep(0.1)  # noqa: ASYNC251  # the test blocks the loop on purpose, for less than the idle interval
        await asyncio.sleep(0.01)
    assert sampler.longest >= 0.1 - BUSY_INTERVAL_SECONDS


@pytest.mark.parametrize("intervals", [1, 7.5, 40])
def test_a_stall_counts_the_samples_that_it_prevented(intervals: float) -> None:
    sampler = LoopLagSampler()
    sampler.record(intervals * BUSY_INTERVAL_SECONDS)
    assert sum(sampler.counts) == pytest.approx(intervals, abs=1)
    assert sampler.counts[bisect_left(LAG_BUCKET_SECONDS, intervals * BUSY_INTERVAL_SECONDS)] >= 1
    assert sampler.longest == intervals * BUSY_INTERVAL_SECONDS


async def test_the_lag_of_a_server_that_blocks_its_loop_is_in_its_metrics() -> None:
    async def block(*_: object) -> list[dict[str, object]]:
        await asyncio.sleep(0.3)
        time.sleep(0.4)  # noqa: ASYNC251  # the test blocks the loop on purpose
        return [build_message("late", id="msg_1")]

    async with testing.serve(testing.build_app(ScriptedModel("blocking", block))) as url:
        await client.post(f"{url}/responses", {"input": "hi"}, retry=client.DEFAULT_RETRY)
        answer = await client.get(f"{url.removesuffix('/v1')}/metrics", retry=client.DEFAULT_RETRY)
    found = {name: value for name, labels, value in parse_samples(answer.text) if labels.get("le") in {None, "+Inf"}}
    assert found["event_loop_lag_max_seconds"] > 0.3
    assert found["event_loop_lag_seconds_count"] >= 0.3 / BUSY_INTERVAL_SECONDS
