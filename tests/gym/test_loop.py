"""The background loop."""

from __future__ import annotations

import asyncio
import os
import threading

import pytest

from gymsdk import UsageError
from gymsdk.gym import loop


async def here() -> threading.Thread:
    return threading.current_thread()


def test_all_that_is_run_shares_one_thread() -> None:
    first, second = loop.run(here()), loop.run(here())
    assert first is second is not threading.current_thread()


async def test_a_running_loop_is_no_obstacle() -> None:
    assert loop.run(here()) is not threading.current_thread()


def test_what_is_raised_there_is_raised_here() -> None:
    async def fail() -> None:
        raise LookupError("there")

    with pytest.raises(LookupError, match="there"):
        loop.run(fail())


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_no_exception_ends_the_loop(error: type[BaseException], caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise error

    thread = loop.run(here())
    with pytest.raises(error):
        loop.run(fail())
    assert loop.run(here()) is thread


def test_to_wait_for_itself_is_refused() -> None:
    async def inside() -> None:
        loop.run(here())

    with pytest.raises(UsageError, match=r"gymsdk\.play"):
        loop.run(inside())


def test_an_interrupted_call_is_ended_before_it_is_given_up() -> None:
    begun, ended = threading.Event(), threading.Event()

    async def sleep() -> None:
        begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.01)
            ended.set()

    def interrupt() -> None:
        begun.wait(30)
        os.kill(os.getpid(), 2)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        loop.run(sleep())
    thread.join()
    assert ended.is_set()


def test_what_is_left_to_it_is_done_by_the_time_it_settles() -> None:
    done = threading.Event()

    async def work() -> None:
        await asyncio.sleep(0.01)
        done.set()

    loop.run(here())
    loop.run_detached(work())
    loop.wait_for_detached()
    assert done.is_set()


def test_what_is_left_and_fails_is_told(caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise LookupError("quietly")

    loop.run(here())
    loop.run_detached(fail())
    loop.wait_for_detached()
    assert "quietly" in caplog.text


def test_in_a_forked_child_there_is_a_loop_of_its_own() -> None:
    loop.run(here())
    child = os.fork()
    if not child:
        code = 1
        try:
            code = 0 if loop.run(here()).is_alive() else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert loop.run(here()).is_alive()
