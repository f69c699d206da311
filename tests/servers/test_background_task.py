from __future__ import annotations

import asyncio
import time

import pytest

from gymsdk import GymsdkError, UsageError
from gymsdk.deploy.runner import BackgroundTask, LoopMonitor


async def _run_until_stopped(up: asyncio.Event, over: asyncio.Event) -> None:
    up.set()
    await over.wait()


async def test_a_task_runs_until_it_is_stopped() -> None:
    background_task = BackgroundTask("a pump", _run_until_stopped)
    await background_task.wait_until_up(5)
    assert not background_task.task.done()
    await background_task.stop(5)
    assert background_task.task.done()


async def test_a_task_that_ends_by_itself_is_reported() -> None:
    async def work(up: asyncio.Event, over: asyncio.Event) -> None:
        up.set()

    background_task = BackgroundTask("a pump", work)
    await background_task.task
    assert str(background_task.describe_failure()) == "a pump ended unexpectedly"


async def test_a_task_that_fails_at_startup_reports_why() -> None:
    async def work(up: asyncio.Event, over: asyncio.Event) -> None:
        raise RuntimeError("no water")

    with pytest.raises(GymsdkError, match="a pump ended unexpectedly: no water"):
        await BackgroundTask("a pump", work).wait_until_up(5)


async def test_a_usage_error_keeps_its_message() -> None:
    async def work(up: asyncio.Event, over: asyncio.Event) -> None:
        raise UsageError("open the tap")

    with pytest.raises(UsageError, match=r"^open the tap$"):
        await BackgroundTask("a pump", work).wait_until_up(5)


async def test_an_error_that_was_raised_is_not_reported_again_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    async def work(up: asyncio.Event, over: asyncio.Event) -> None:
        raise UsageError("open the tap")

    background_task, other = BackgroundTask("a pump", work), BackgroundTask("another", work)
    with pytest.raises(UsageError):
        await background_task.wait_until_up(5)
    await background_task.stop(5)
    await other.stop(5)
    assert [each.getMessage() for each in caplog.records] == ["another ended with an error: UsageError('open the tap')"]


@pytest.mark.slow
async def test_a_task_that_does_not_end_is_named_and_abandoned(caplog: pytest.LogCaptureFixture) -> None:
    freed = asyncio.Event()

    async def work(up: asyncio.Event, over: asyncio.Event) -> None:
        up.set()
        while not freed.is_set():
            try:
                await freed.wait()
            except asyncio.CancelledError:
                continue

    background_task = BackgroundTask("a pump", work)
    await background_task.wait_until_up(5)
    await background_task.stop(0.05)
    assert "a pump did not end within 0.05 seconds; it is left behind" in caplog.text
    assert not background_task.task.done()
    freed.set()
    await background_task.task


async def test_a_heartbeat_is_recent_until_the_event_loop_is_blocked() -> None:
    pulse = LoopMonitor(limit=0.2)
    background_task = BackgroundTask("the pulse", pulse.run)
    await background_task.wait_until_up(5)
    assert pulse.is_recent()
    time.sleep(0.3)  # noqa: ASYNC251 - it blocks the event loop on purpose
    assert not pulse.is_recent()
    await background_task.stop(5)
