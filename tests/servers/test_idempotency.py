"""Repeated requests with one key run the operation once."""

from __future__ import annotations

import asyncio

import pytest

from gymsdk.edge.limits import ENTRY_OVERHEAD_BYTES, IdempotencyCache


class Operation:
    """An operation that counts its runs and finishes when it is released."""

    def __init__(self, answer: bytes = b"done", *, failures: int = 0) -> None:
        self.runs = 0
        self.cancelled = 0
        self.released = asyncio.Event()
        self._answer = answer
        self._failures = failures

    async def __call__(self) -> bytes:
        self.runs += 1
        try:
            await self.released.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.runs <= self._failures:
            raise ValueError("broken")
        return self._answer


async def test_two_concurrent_requests_share_one_run() -> None:
    cache, work = IdempotencyCache(), Operation()
    both = [asyncio.ensure_future(cache("a", work)) for _ in range(2)]
    await asyncio.sleep(0)
    work.released.set()
    assert await asyncio.gather(*both) == [b"done", b"done"]
    assert work.runs == 1


async def test_a_later_request_gets_the_same_response() -> None:
    cache, work = IdempotencyCache(), Operation()
    work.released.set()
    assert await cache("a", work) == await cache("a", work)
    assert (work.runs, len(cache)) == (1, 1)


async def test_another_key_is_another_run() -> None:
    cache, work = IdempotencyCache(), Operation()
    work.released.set()
    await cache("a", work)
    await cache("b", work)
    assert work.runs == 2


async def test_a_failure_reaches_all_waiting_requests_and_the_next_runs_again() -> None:
    cache, work = IdempotencyCache(), Operation(failures=1)
    both = [asyncio.ensure_future(cache("a", work)) for _ in range(2)]
    await asyncio.sleep(0)
    work.released.set()
    errors = await asyncio.gather(*both, return_exceptions=True)
    assert [type(each) for each in errors] == [ValueError, ValueError]
    assert await cache("a", work) == b"done"


async def test_a_cancelled_request_leaves_the_run_to_the_other() -> None:
    cache, work = IdempotencyCache(), Operation()
    first, second = (asyncio.ensure_future(cache("a", work)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.sleep(0)
    work.released.set()
    assert await second == b"done"
    assert work.cancelled == 0


async def test_a_run_without_waiting_requests_is_cancelled_and_started_anew() -> None:
    cache, work = IdempotencyCache(), Operation()
    only = asyncio.ensure_future(cache("a", work))
    await asyncio.sleep(0)
    only.cancel()
    with pytest.raises(asyncio.CancelledError):
        await only
    work.released.set()
    assert await cache("a", work) == b"done"
    assert (work.runs, work.cancelled) == (2, 1)


async def test_responses_expire_by_age_and_by_size() -> None:
    now = 0.0
    cache, work = (
        IdempotencyCache(seconds=10, largest=2 * (ENTRY_OVERHEAD_BYTES + 6), clock=lambda: now),
        Operation(b"12345"),
    )
    work.released.set()
    for key in "abc":
        await cache(key, work)
    assert len(cache) == 2
    now = 11.0
    await cache("d", work)
    assert len(cache) == 1


async def test_a_response_that_is_not_kept_is_shared_only_while_it_runs() -> None:
    cache, work = IdempotencyCache(), Operation()
    both = [asyncio.ensure_future(cache("a", work, keep=False)) for _ in range(2)]
    await asyncio.sleep(0)
    work.released.set()
    assert await asyncio.gather(*both) == [b"done", b"done"]
    assert await cache("a", work, keep=False) == b"done"
    assert (work.runs, len(cache)) == (2, 0)


async def test_replacing_a_response_takes_no_more_memory() -> None:
    now = 0.0
    cache = IdempotencyCache(seconds=10, largest=2 * (ENTRY_OVERHEAD_BYTES + 6), clock=lambda: now)
    slow, quick = Operation(b"12345"), Operation(b"54321")
    quick.released.set()
    cancelled = asyncio.ensure_future(cache("a", slow))
    await asyncio.sleep(0)
    cancelled.cancel()
    slow.released.set()
    for key in ("a", "b"):
        await cache(key, quick)
    await asyncio.gather(cancelled, return_exceptions=True)
    assert len(cache) == 2


async def test_closing_waits_for_running_operations_to_end() -> None:
    finished = []

    async def work() -> bytes:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            finished.append("work")
        raise AssertionError

    cache = IdempotencyCache()
    request = asyncio.ensure_future(cache("a", work))
    await asyncio.sleep(0)
    request.cancel()
    await asyncio.sleep(0)
    await cache.aclose()
    assert finished == ["work"]
    assert request.cancelled()
