"""The background event loop."""

from __future__ import annotations

import asyncio
import os
import threading

import pytest

from gymsdk import UsageError
from gymsdk.gym import slot


async def get_thread() -> threading.Thread:
    return threading.current_thread()


async def test_run_works_inside_a_running_loop() -> None:
    assert slot.run(get_thread()) is not threading.current_thread()


@pytest.mark.parametrize("error", [LookupError, KeyboardInterrupt, SystemExit])
def test_an_exception_is_raised_in_the_caller_and_does_not_stop_the_loop(error: type[BaseException]) -> None:
    async def fail() -> None:
        raise error

    thread = slot.run(get_thread())
    with pytest.raises(error):
        slot.run(fail())
    assert slot.run(get_thread()) is thread is not threading.current_thread()


def test_a_loop_that_would_wait_for_itself_is_rejected() -> None:
    async def inside() -> None:
        slot.run(get_thread())

    with pytest.raises(UsageError, match=r"gymsdk\.play"):
        slot.run(inside())


def test_an_interrupted_call_finishes_its_cleanup_before_run_returns() -> None:
    started, finished = threading.Event(), threading.Event()

    async def sleep() -> None:
        started.set()
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.01)
            finished.set()

    def interrupt() -> None:
        started.wait(30)
        os.kill(os.getpid(), 2)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        slot.run(sleep())
    thread.join()
    assert finished.is_set()


def test_detached_work_is_finished_after_waiting_for_it_and_its_failure_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    done = threading.Event()

    async def fail() -> None:
        await asyncio.sleep(0.01)
        done.set()
        raise LookupError("quietly")

    slot.run(get_thread())
    slot.run_detached(fail())
    slot.wait_for_detached()
    assert done.is_set()
    assert "quietly" in caplog.text


def test_a_forked_child_has_a_new_loop() -> None:
    slot.run(get_thread())
    child = os.fork()
    if not child:
        code = 1
        try:
            code = 0 if slot.run(get_thread()).is_alive() else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert slot.run(get_thread()).is_alive()
