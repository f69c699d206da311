"""Repeated requests with one key run the operation once."""

from __future__ import annotations

import asyncio

import pytest

from gymsdk.servers.idempotency import ENTRY_OVERHEAD_BYTES, IdempotencyCache


class Work:
    """Counts how often it is done; done when it is let go."""

    def __init__(self, answer: bytes = b"done", *, breaks: int = 0) -> None:
        self.done = 0
        self.given_up = 0
        self.go = asyncio.Event()
        self._answer = answer
        self._breaks = breaks

    async def __call__(self) -> bytes:
        self.done += 1
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.given_up += 1
            raise
        if self.done <= self._breaks:
            raise ValueError("broken")
        return self._answer


async def test_two_concurrent_requests_share_one_run() -> None:
    once, work = IdempotencyCache(), Work()
    both = [asyncio.ensure_future(once("a", work)) for _ in range(2)]
    await asyncio.sleep(0)
    work.go.set()
    assert await asyncio.gather(*both) == [b"done", b"done"]
    assert work.done == 1


async def test_a_later_request_gets_the_same_response() -> None:
    once, work = IdempotencyCache(), Work()
    work.go.set()
    assert await once("a", work) == await once("a", work)
    assert (work.done, len(once)) == (1, 1)


async def test_another_key_is_another_run() -> None:
    once, work = IdempotencyCache(), Work()
    work.go.set()
    await once("a", work)
    await once("b", work)
    assert work.done == 2


async def test_a_failure_reaches_all_waiting_requests_and_the_next_runs_again() -> None:
    once, work = IdempotencyCache(), Work(breaks=1)
    both = [asyncio.ensure_future(once("a", work)) for _ in range(2)]
    await asyncio.sleep(0)
    work.go.set()
    told = await asyncio.gather(*both, return_exceptions=True)
    assert [type(each) for each in told] == [ValueError, ValueError]
    assert await once("a", work) == b"done"


async def test_a_cancelled_request_leaves_the_run_to_the_other() -> None:
    once, work = IdempotencyCache(), Work()
    first, second = (asyncio.ensure_future(once("a", work)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.sleep(0)
    work.go.set()
    assert await second == b"done"
    assert work.given_up == 0


async def test_a_run_without_waiting_requests_is_cancelled_and_started_anew() -> None:
    once, work = IdempotencyCache(), Work()
    only = asyncio.ensure_future(once("a", work))
    await asyncio.sleep(0)
    only.cancel()
    with pytest.raises(asyncio.CancelledError):
        await only
    work.go.set()
    assert await once("a", work) == b"done"
    assert (work.done, work.given_up) == (2, 1)


async def test_responses_expire_by_age_and_by_size() -> None:
    now = 0.0
    once, work = IdempotencyCache(seconds=10, largest=2 * (ENTRY_OVERHEAD_BYTES + 6), clock=lambda: now), Work(b"12345")
    work.go.set()
    for key in "abc":
        await once(key, work)
    assert len(once) == 2
    now = 11.0
    await once("d", work)
    assert len(once) == 1


async def test_a_response_that_is_not_kept_is_shared_only_while_it_runs() -> None:
    once, work = IdempotencyCache(), Work()
    both = [asyncio.ensure_future(once("a", work, keep=False)) for _ in range(2)]
    await asyncio.sleep(0)
    work.go.set()
    assert await asyncio.gather(*both) == [b"done", b"done"]
    assert await once("a", work, keep=False) == b"done"
    assert (work.done, len(once)) == (2, 0)


async def test_replacing_a_response_takes_no_more_memory() -> None:
    now = 0.0
    once = IdempotencyCache(seconds=10, largest=2 * (ENTRY_OVERHEAD_BYTES + 6), clock=lambda: now)
    slow, quick = Work(b"12345"), Work(b"54321")
    quick.go.set()
    given_up = asyncio.ensure_future(once("a", slow))
    await asyncio.sleep(0)
    given_up.cancel()
    slow.go.set()
    for key in ("a", "b"):
        await once(key, quick)
    await asyncio.gather(given_up, return_exceptions=True)
    assert len(once) == 2


async def test_closing_waits_for_running_operations_to_end() -> None:
    ended = []

    async def work() -> bytes:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            ended.append("work")
        raise AssertionError

    once = IdempotencyCache()
    asking = asyncio.ensure_future(once("a", work))
    await asyncio.sleep(0)
    asking.cancel()
    await asyncio.sleep(0)
    await once.aclose()
    assert ended == ["work"]
    assert asking.cancelled()
