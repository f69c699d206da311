"""The open loop: arrivals, latencies from the arrival, and the verdict on the servers."""

from __future__ import annotations

import asyncio
from array import array
from itertools import islice, pairwise

import pytest

from gymsdk.bench.arrivals import ArrivalLog, compute_rate, draw_arrivals, send_at_arrivals
from gymsdk.rollouts.jobs import Job

JOBS = tuple(Job("sums", task, 0, {}) for task in range(40))


def test_arrivals_are_reproducible_and_have_the_requested_rate() -> None:
    times = [*islice(draw_arrivals(50.0, seed=1), 5000)]
    assert times == [*islice(draw_arrivals(50.0, seed=1), 5000)]
    assert times != [*islice(draw_arrivals(50.0, seed=2), 5000)]
    assert times == sorted(times)
    assert 5000 / times[-1] == pytest.approx(50.0, rel=0.05)
    gaps = [after - before for before, after in pairwise(times)]
    # In a Poisson process, the standard deviation of the gaps equals their mean.
    assert sum((gap - 0.02) ** 2 for gap in gaps) / len(gaps) == pytest.approx(0.02**2, rel=0.1)


async def test_latency_counts_from_the_arrival_and_not_from_the_sending() -> None:
    latencies: list[float] = []

    async def send(_: Job) -> None:
        await asyncio.sleep(0.05)

    log = await send_at_arrivals(JOBS[:4], [0.0] * 4, send, latencies.append, limit=1)
    assert [latency >= 0.05 * number for number, latency in enumerate(latencies, 1)] == [True] * 4
    assert (log.most, log.delayed, log.outstanding) == (1, 3, 0)
    assert sum(log.waits) >= 0.05 + 0.1 + 0.15


async def test_arrivals_do_not_wait_for_earlier_rollouts() -> None:
    release = asyncio.Event()

    async def send(job: Job) -> None:
        if job.task == 39:
            release.set()
        await release.wait()

    log = await send_at_arrivals(JOBS, [0.001 * number for number in range(40)], send, lambda _: None, limit=100)
    assert (log.most, log.delayed) == (40, 0)


async def test_no_rollout_arrives_after_the_end_of_a_timed_load() -> None:
    sent: list[int] = []

    async def send(job: Job) -> None:
        sent.append(job.task)

    await send_at_arrivals(JOBS, [0.01, 0.02, 5.0], send, lambda _: None, limit=100, seconds=0.1)
    assert sent == [0, 1]


def test_a_constant_latency_does_not_change_the_rate() -> None:
    due = array("d", (0.1 * number for number in range(100)))
    assert compute_rate(due) == pytest.approx(10.0)
    assert compute_rate(array("d", (time + 30.0 for time in due))) == pytest.approx(10.0)
    assert compute_rate(array("d", [1.0])) is None


@pytest.mark.parametrize(("service_rate", "keeps_up"), [(10.0, True), (9.7, True), (8.0, False)])
def test_servers_keep_up_if_they_complete_rollouts_as_fast_as_these_arrive(service_rate: float, keeps_up: bool) -> None:
    log = ArrivalLog()
    for number in range(200):
        log.record_sent(0.1 * number, 0.1 * number, delayed=False)
    for number in range(200):
        log.record_completed(1.0 + number / service_rate)
    found = log.summarise(10.0)
    assert (found.offered, found.achieved) == (pytest.approx(10.0), pytest.approx(service_rate, abs=0.01))
    assert found.keeps_up is keeps_up
