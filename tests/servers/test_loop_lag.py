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


@pytest.mark.parametrize(("running", "blocked", "after"), [(1, 0.3, 0.05), (0, 0.1, 0.01)])
async def test_a_blocked_loop_is_recorded_with_its_length_also_by_the_idle_timer(running, blocked, after):
    metrics = ServerMetrics("made")
    metrics.in_flight = running
    with sample_loop_lag(metrics) as sampler:
        if not running:
            # A request makes the idle timer fast at once: the loop is blocked for less than the idle interval.
            metrics.start_request()
        await asyncio.sleep(0)
        time.sleep(blocked)  # noqa: ASYNC251  # the test blocks the loop on purpose
        await asyncio.sleep(after)
    assert sampler.longest >= blocked - BUSY_INTERVAL_SECONDS


async def test_servers_of_one_loop_share_a_sampler_that_ends_with_the_last():
    one, other = ServerMetrics("one"), ServerMetrics("other")
    with sample_loop_lag(one) as first:
        with sample_loop_lag(other) as second:
            assert first is second
        assert first.servers == [one]
    with sample_loop_lag(one) as later:
        assert later is not first


@pytest.mark.parametrize("intervals", [1, 7.5, 40])
def test_a_stall_counts_the_samples_that_it_prevented(intervals):
    sampler = LoopLagSampler()
    sampler.record(intervals * BUSY_INTERVAL_SECONDS)
    assert sum(sampler.counts) == pytest.approx(intervals, abs=1)
    assert sampler.counts[bisect_left(LAG_BUCKET_SECONDS, intervals * BUSY_INTERVAL_SECONDS)] >= 1
    assert sampler.longest == intervals * BUSY_INTERVAL_SECONDS


async def test_the_lag_of_a_server_that_blocks_its_loop_is_in_its_metrics():
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
