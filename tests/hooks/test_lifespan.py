"""The `lifespan` hook: its arguments, its valid results, and the failures of invalid results."""

from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager

import pytest

from gymsdk import BrokenEnvironment, Environment, UsageError, hookimpl

from .environments import Judge


async def test_lifespan_is_entered_and_left_once_for_all_episodes(task):
    events: list[str] = []

    class Lives(Judge):
        @hookimpl
        @asynccontextmanager
        async def lifespan(self):
            events.append("begin")
            yield events
            events.append("end")

        @hookimpl
        def reset(self, shared):
            shared.append("reset")

    async with Environment("lives", Lives()) as environment:
        await environment.reset(task)
        await environment.reset(task)
    assert events == ["begin", "reset", "reset", "end"]
    message = "environment 'lives' has a lifespan; play it inside `async with environment:`"
    with pytest.raises(UsageError, match=message):
        await environment.reset(task)


class Lifespan(Judge):
    def __init__(self, context) -> None:
        self.context = context

    @hookimpl
    def lifespan(self):
        return self.context()


@asynccontextmanager
async def fail_on_entry():
    raise ConnectionError("no index")
    yield


@asynccontextmanager
async def fail_on_exit():
    yield "index"
    raise ConnectionError("no index")


@pytest.mark.parametrize(
    ("context", "message"),
    [(fail_on_entry, "ConnectionError: no index"), (object, "TypeError: .*context manager"), (lambda: 1 / 0, "Zero")],
)
async def test_a_lifespan_that_fails_on_entry_breaks_the_environment(context, message):
    with pytest.raises(BrokenEnvironment, match=f"environment 'lives': hook 'lifespan' raised {message}"):
        await Environment("lives", Lifespan(context)).__aenter__()


async def test_lifespan_that_fails_on_exit_is_logged_and_changes_nothing_and_it_is_optional(caplog, task):
    caplog.set_level(logging.WARNING)
    for plugin in (Judge(), Lifespan(lambda: None), Lifespan(fail_on_exit)):
        async with Environment("lives", plugin) as environment:
            assert (await environment.reset(task)).task == task
    assert caplog.text.count("environment 'lives': hook 'lifespan' failed when it ended: ") == 1
    assert "ConnectionError('no index')" in caplog.text


async def test_lifespan_is_entered_once_for_two_simultaneous_callers(task):
    events: list[str] = []

    @asynccontextmanager
    async def live():
        events.append("begin")
        await asyncio.sleep(0.01)
        yield events
        events.append("end")

    environment = Environment("slow", Lifespan(live))

    async def enter() -> None:
        async with environment:
            assert environment._lifespan.shared is events

    await asyncio.gather(enter(), enter())
    assert events == ["begin", "end"]
    # It lasts until the last caller leaves.
    async with environment:
        async with environment:
            pass
        assert (await environment.reset(task)).task == task
        assert events == ["begin", "end", "begin"]
    assert events == ["begin", "end", "begin", "end"]
