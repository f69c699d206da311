"""Deadlines end blocks like those of asyncio."""

from __future__ import annotations

import asyncio

import pytest

from gymsdk.concurrency import timeout_at


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
