from __future__ import annotations

import asyncio
import logging
import time

import pytest

from gymsdk.plugins.calls import (
    MAX_LOOP_BLOCK_SECONDS,
    Deadline,
    get_loop_time_after,
    run_until_deadline,
    start_task,
    warn_when_blocking,
)


def soon(seconds: float = 0.05) -> Deadline:
    return Deadline(get_loop_time_after(seconds))


@pytest.mark.slow
async def test_a_coroutine_that_suppresses_its_cancellation_is_abandoned(caplog):
    over = asyncio.Event()

    async def stubborn():
        while not over.is_set():
            try:
                await over.wait()
            except asyncio.CancelledError:
                continue
        raise ValueError("late")

    with pytest.raises(TimeoutError):
        await run_until_deadline(stubborn(), soon())
    over.set()
    await asyncio.sleep(0.01)
    assert "abandoned code failed after its deadline: ValueError('late')" in caplog.text


async def test_cancelling_the_waiter_cancels_the_coroutine_too():
    cancelled = asyncio.Event()

    async def hang():
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    waiting = asyncio.ensure_future(run_until_deadline(hang(), soon(60)))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert cancelled.is_set()


async def test_a_warning_names_a_coroutine_that_blocks_the_loop_and_not_one_that_waits(caplog):
    caplog.set_level(logging.WARNING)
    await warn_when_blocking(asyncio.sleep(MAX_LOOP_BLOCK_SECONDS * 1.5), "tool 'wait'")
    assert caplog.text == ""

    async def block():
        time.sleep(MAX_LOOP_BLOCK_SECONDS * 1.5)  # noqa: ASYNC251  # blocks the loop on purpose
        await asyncio.sleep(0)
        time.sleep(MAX_LOOP_BLOCK_SECONDS * 1.5)  # noqa: ASYNC251  # blocks the loop on purpose
        return 42

    assert await warn_when_blocking(block(), "tool 'dig'") == 42
    assert [record.message.split(" for ")[0] for record in caplog.records] == ["tool 'dig' held the event loop"] * 2
    assert "write it as a plain `def`, or offload the work" in caplog.text


async def test_tasks_that_start_together_can_await_the_same_future():
    batch = asyncio.get_running_loop().create_future()

    async def judge():
        return await batch

    tasks = [start_task(judge()) for _ in range(3)]
    asyncio.get_running_loop().call_later(0.01, batch.set_result, "all")
    assert await asyncio.gather(*tasks) == ["all"] * 3


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_exception_that_ends_the_process_in_the_first_step_leaves_no_task_that_fails(error):
    async def stop():
        raise error

    async def start():
        with pytest.raises(error):
            start_task(stop())
        left = asyncio.all_tasks() - {asyncio.current_task()}
        return await asyncio.gather(*left, return_exceptions=True)

    with asyncio.Runner() as runner:
        outcomes = runner.run(start())
    assert not [outcome for outcome in outcomes if isinstance(outcome, RuntimeError)]
