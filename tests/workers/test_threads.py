from __future__ import annotations

import asyncio
import contextvars
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from gymsdk.concurrency import CrossLoopSemaphore, ThreadPool
from gymsdk.errors import Failed

asked = contextvars.ContextVar("asked", default="nobody")


@pytest.fixture
def door() -> Iterator[threading.Event]:
    """An event that hanging functions wait for; the fixture sets it at the end."""
    event = threading.Event()
    yield event
    event.set()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - threads send no notification
            await asyncio.sleep(0.01)


async def test_a_call_ends_as_the_function_does_in_another_thread_with_the_context_of_the_caller() -> None:
    threads = ThreadPool()
    asked.set("somebody")
    assert await threads.run(asked.get) == "somebody"
    [used] = {await threads.run(threading.get_ident) for _ in range(20)}
    assert used != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        await threads.run(lambda: 1 // 0)
    with pytest.raises(RuntimeError, match="StopIteration"):
        await threads.run(next, iter(()))
    with pytest.raises(Failed, match="exit ended with SystemExit") as failure:
        await threads.run(sys.exit)
    assert failure.value.kind == "exit"


async def test_no_more_than_the_limit_run_at_once() -> None:
    running: list[int] = []
    most: list[int] = []
    pause = threading.Event()

    def work() -> None:
        running.append(1)
        most.append(len(running))
        pause.wait(0.01)
        running.pop()

    threads = ThreadPool(3)
    await asyncio.gather(*(threads.run(work) for _ in range(12)))
    assert max(most) <= 3


async def test_a_call_past_its_deadline_or_cancelled_is_abandoned_by_name(door: threading.Event) -> None:
    threads = ThreadPool()
    with pytest.raises(TimeoutError, match=r"Event.wait has not returned after 0.05 s"):
        await threads.run(door.wait, timeout=0.05)
    assert threads.hung == 1
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await threads.run(door.wait)
    assert threads.hung == 2


async def test_six_hung_calls_do_not_starve_the_seventh(door: threading.Event) -> None:
    threads = ThreadPool(6)
    hanging = [asyncio.create_task(threads.run(door.wait, timeout=0.05)) for _ in range(6)]
    assert await threads.run(lambda: "served", timeout=5.0) == "served"
    assert all(isinstance(end, TimeoutError) for end in await asyncio.gather(*hanging, return_exceptions=True))


async def test_a_hung_thread_that_comes_back_is_forgotten(door: threading.Event) -> None:
    threads = ThreadPool(1)
    with pytest.raises(TimeoutError):
        await threads.run(door.wait, timeout=0.01)
    door.set()
    await until(lambda: threads.hung == 0)
    assert await threads.run(lambda: "its own result") == "its own result"


async def test_with_too_many_hung_threads_a_call_is_refused(door: threading.Event) -> None:
    threads = ThreadPool(2, max_hung=2)
    for _ in range(2):
        with pytest.raises(TimeoutError):
            await threads.run(door.wait, timeout=0.01)
    with pytest.raises(Failed, match="2 calls hang in abandoned threads") as refusal:
        await threads.run(len, "")
    assert refusal.value.kind == "threads_exhausted"


async def test_a_call_cancelled_while_it_waits_for_a_thread_leaves_its_place(door: threading.Event) -> None:
    threads = ThreadPool(1)
    first = asyncio.create_task(threads.run(door.wait))
    await asyncio.sleep(0)
    second = asyncio.create_task(threads.run(len, "never"))
    await asyncio.sleep(0)
    second.cancel()
    door.set()
    assert await first
    assert await threads.run(len, "third") == 5


async def test_a_permit_for_a_cancelled_waiter_goes_to_the_next() -> None:
    permits = CrossLoopSemaphore(1)
    await permits.acquire()
    waiting = asyncio.create_task(permits.acquire())
    await asyncio.sleep(0)
    permits.release()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    async with asyncio.timeout(5):
        await permits.acquire()


def test_loops_in_several_threads_share_the_limit() -> None:
    threads = ThreadPool(1)
    results: list[int] = []

    def play() -> None:
        async def calls() -> list[int]:
            return await asyncio.gather(*(threads.run(len, "four") for _ in range(50)))

        results.extend(asyncio.run(calls()))

    players = [threading.Thread(target=play) for _ in range(3)]
    for player in players:
        player.start()
    for player in players:
        player.join(30)
    assert results == [4] * 150
    # The threads serve several loops one after another, too.
    assert [asyncio.run(threads.run(len, "x" * size)) for size in range(3)] == [0, 1, 2]


def test_a_process_with_a_hung_thread_exits_at_once() -> None:
    script = """if True:
        import asyncio, threading
        from gymsdk.concurrency import ThreadPool
        async def main():
            try:
                await ThreadPool().run(threading.Event().wait, timeout=0.05)
            except TimeoutError:
                print("abandoned")
        asyncio.run(main())
    """
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=True)
    assert (ended.stdout, ended.stderr) == ("abandoned\n", "")


def test_a_forked_process_has_threads_of_its_own() -> None:
    script = """if True:
        import asyncio, os
        from gymsdk.concurrency import ThreadPool
        threads = ThreadPool(1)
        asyncio.run(threads.run(len, ""))
        child = os.fork()
        assert asyncio.run(threads.run(len, "child")) == 5
        if child:
            assert os.waitpid(child, 0)[1] == 0
            print("both")
    """
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=True)
    assert ended.stdout == "both\n"
