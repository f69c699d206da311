from __future__ import annotations

import asyncio
import os
import signal
import threading

import pytest

from gymsdk.cli.process import Stopped, run_until_signal


def test_a_process_that_continues_after_a_stop_stays_alive() -> None:
    async def work() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(60)

    with pytest.raises(Stopped) as caught:
        run_until_signal(work())
    assert caught.value.code == 128 + signal.SIGINT
    timers = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
    for timer in timers:
        timer.join(5)
    assert not any(timer.is_alive() for timer in timers)


def test_a_cancellation_without_a_signal_is_not_a_stop() -> None:
    async def work() -> None:
        raise asyncio.CancelledError

    with pytest.raises(RuntimeError, match="the work was cancelled, but not by a signal"):
        run_until_signal(work())
