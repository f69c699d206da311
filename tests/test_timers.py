"""Shared timers end like those of the event loop, and leave nothing behind."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
import weakref

import pytest

from gymsdk import concurrency
from gymsdk.concurrency import call_at, create_event_loop, timeout_at


@pytest.fixture(autouse=True)
def _share_short_timers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(concurrency, "MIN_SHARED_SECONDS", 0.0)


async def test_a_block_past_its_deadline_raises_a_timeout_error() -> None:
    loop = asyncio.get_running_loop()
    with pytest.raises(TimeoutError), timeout_at(loop.time() + 0.2):
        await asyncio.Event().wait()
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_a_block_that_ends_in_time_is_not_cancelled_later() -> None:
    loop = asyncio.get_running_loop()
    with timeout_at(loop.time() + 0.2):
        await asyncio.sleep(0)
    await asyncio.sleep(0.4)


async def test_a_timeout_does_not_hide_the_cancellation_of_the_task() -> None:
    loop = asyncio.get_running_loop()

    async def wait() -> None:
        with timeout_at(loop.time() + 60):
            await asyncio.Event().wait()

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_error_of_the_block_is_not_replaced_by_a_timeout() -> None:
    loop = asyncio.get_running_loop()
    with pytest.raises(ValueError, match="own"), timeout_at(loop.time() + 60):
        raise ValueError("own")


async def test_timers_run_in_the_order_of_their_ticks_and_not_before_their_time() -> None:
    loop, ran = asyncio.get_running_loop(), []
    began = loop.time()
    for seconds in (0.5, 0.1, 0.3):
        call_at(loop, began + seconds, lambda seconds=seconds: ran.append((seconds, loop.time() - began)))
    await asyncio.sleep(0.9)
    assert [seconds for seconds, _ in ran] == [0.1, 0.3, 0.5]
    # The clock of the loop has a resolution of a millisecond.
    assert all(at >= seconds - 0.002 for seconds, at in ran)


async def test_a_timer_can_cancel_another_one_of_its_tick() -> None:
    loop, ran = asyncio.get_running_loop(), []
    when = loop.time() + 0.2
    handles = []

    def run(number: int) -> None:
        ran.append(number)
        for handle in handles:
            handle.cancel()

    handles += [call_at(loop, when, lambda number=number: run(number)) for number in range(3)]
    await asyncio.sleep(0.5)
    assert ran == [0]


async def test_cancelled_timers_leave_no_ticks_behind() -> None:
    loop = asyncio.get_running_loop()
    for number in range(100):
        call_at(loop, loop.time() + 0.1 + number / 1000, print).cancel()
    last = asyncio.Event()
    call_at(loop, loop.time() + 0.3, last.set)
    async with asyncio.timeout(10):
        await last.wait()
    clock = concurrency._clocks[loop]
    assert clock._ticks == {}
    assert clock._order == []
    assert clock._next_tick is None


async def test_cancelled_timers_release_their_memory_before_their_tick() -> None:
    loop = asyncio.get_running_loop()
    began = loop.time() + 60
    tracemalloc.start()
    try:
        for tick in range(100):
            started = [call_at(loop, began + tick, lambda: None) for _ in range(500)]
            for timer in started:
                timer.cancel()
        del started
        gc.collect()
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # Threads of other tests may allocate memory at the same time.
    assert kept < 500_000, "10 kB for each tick would be 1 MB"


def test_a_closed_event_loop_is_not_kept() -> None:
    async def start_timer() -> None:
        call_at(asyncio.get_running_loop(), asyncio.get_running_loop().time() + 60, print)

    for create in (asyncio.new_event_loop, create_event_loop):
        loop = create()
        loop.run_until_complete(start_timer())
        loop.close()
        kept = weakref.ref(loop)
        del loop
        gc.collect()
        assert kept() is None, create


async def test_an_error_of_a_callback_does_not_prevent_the_other_callbacks_of_its_tick(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(concurrency, "MIN_SHARED_SECONDS", 0.0)
    loop, errors, called = asyncio.get_running_loop(), [], asyncio.Event()
    loop.set_exception_handler(lambda _, context: errors.append(context["exception"]))
    try:
        when = loop.time() + 0.05
        call_at(loop, when, lambda: 1 / 0)
        call_at(loop, when, called.set)
        async with asyncio.timeout(30):
            await called.wait()
    finally:
        loop.set_exception_handler(None)
    assert [type(each) for each in errors] == [ZeroDivisionError]
