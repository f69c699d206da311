"""Coroutines that cannot suspend run without a task, and otherwise like one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from contextvars import ContextVar
from functools import partial, wraps

import pytest

from gymsdk import Verdict, hookimpl, play
from gymsdk.environment import Environment
from gymsdk.plugins.calls import MAX_LOOP_BLOCK_SECONDS, never_suspends, run_without_suspending

setting: ContextVar[str] = ContextVar("setting", default="unset")


async def _return_directly(value: int) -> int:
    async def unused() -> None:
        await asyncio.sleep(0)

    return value


async def _await() -> None:
    await asyncio.sleep(0)


async def _iterate() -> list[int]:
    async def count():
        yield 1

    return [value async for value in count()]


async def _enter() -> None:
    async with contextlib.AsyncExitStack():
        pass


def _decorate(function):
    @wraps(function)
    async def decorated(*args):
        return await function(*args)

    return decorated


def _plain() -> None: ...


async def _generate():
    yield 1


class _Grader:
    async def grade(self) -> int:
        return 3


def test_only_a_coroutine_function_without_await_never_suspends():
    assert all(map(never_suspends, [_return_directly, _Grader().grade]))
    others = [_await, _iterate, _enter, _decorate(_return_directly), partial(_return_directly, 1), _plain, _generate]
    assert not any(map(never_suspends, [*others, print]))


async def test_its_result_is_returned_and_its_context_is_its_own():
    async def change() -> str:
        setting.set("changed")
        return setting.get()

    assert run_without_suspending(change(), "hook 'verify'") == "changed"
    assert setting.get() == "unset"


async def test_an_exit_and_a_cancellation_do_not_reach_the_event_loop():
    async def leave() -> None:
        raise SystemExit(3)

    async def cancel() -> None:
        raise asyncio.CancelledError

    with pytest.raises(RuntimeError, match=r"SystemExit\(3\)"):
        run_without_suspending(leave(), "hook 'verify'")
    with pytest.raises(TimeoutError):
        run_without_suspending(cancel(), "hook 'verify'")
    with pytest.raises(RuntimeError, match="hook 'verify' suspended"):
        run_without_suspending(_await(), "hook 'verify'")


async def test_a_hook_that_blocks_the_loop_is_named(policy, caplog):
    class Blocking:
        @hookimpl
        async def verify(self) -> Verdict:
            time.sleep(2 * MAX_LOOP_BLOCK_SECONDS)  # noqa: ASYNC251 - the test is about it
            return Verdict(reward=1.0)

    with caplog.at_level(logging.WARNING, logger="gymsdk"):
        rollout = await play(Environment("blocks", Blocking()), policy("4"), {"responses_create_params": {"input": ""}})
    assert rollout.reward == 1.0
    assert "hook 'verify' of environment 'blocks' held the event loop" in caplog.text
