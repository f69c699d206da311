"""A default plugin without one hook fails a test in `test_floor` whose name begins with that hook."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator

import pytest

from gymsdk import Environment, Message, environment
from gymsdk.plugins.hooks import hookimpl
from gymsdk.plugins.stack import DefaultPlugin

from . import test_floor

ANSWERS = [name for name, value in vars(DefaultPlugin).items() if hasattr(value, "gymsdk_impl")]


def without(hook: str) -> type[DefaultPlugin]:
    """A default plugin without *hook*."""
    return type("Without", (DefaultPlugin,), {hook: None})


class NoReply(DefaultPlugin):
    """A default plugin that ignores replies."""

    @hookimpl
    async def step(self, task, state, action, config, shared):
        return (
            None if isinstance(action, Message) else await DefaultPlugin.step(self, task, state, action, config, shared)
        )


class NoTool(DefaultPlugin):
    """A default plugin that ignores tool calls."""

    @hookimpl
    async def step(self, task, state, action, config, shared):
        return (
            await DefaultPlugin.step(self, task, state, action, config, shared) if isinstance(action, Message) else None
        )


class Unchecked(DefaultPlugin):
    """A default plugin that does not validate arguments."""

    @hookimpl
    async def step(self, task, state, action, config, shared):
        if isinstance(action, Message):
            return await DefaultPlugin.step(self, task, state, action, config, shared)
        asked = {"state": state} if "state" in self.toolbox[action.name].host_parameters else {}
        return test_floor.Step(output=str(self.toolbox[action.name].function(**action.parsed(), **asked)))


def behaviour(hook: str) -> Iterator[Callable[..., object]]:
    return (value for name, value in vars(test_floor).items() if name.startswith(f"test_{hook}"))


async def failing(hook: str, request: pytest.FixtureRequest) -> list[str]:
    """The names of the tests of *hook* that fail."""
    return [test.__name__ for test in behaviour(hook) if not await passes(test, request)]


async def passes(test: Callable[..., object], request: pytest.FixtureRequest) -> bool:
    fixtures = {name: request.getfixturevalue(name) for name in inspect.signature(test).parameters if name != "over"}
    try:
        outcome = test(over=lambda plugin: Environment("packing", plugin), **fixtures)
        if inspect.isawaitable(outcome):
            await outcome
    except (Exception, pytest.fail.Exception):  # noqa: BLE001  # a test may fail in any way
        return False
    return True


@pytest.mark.parametrize(
    ("floor", "hook"),
    [*((without(hook), hook) for hook in ANSWERS), (NoReply, "step"), (NoTool, "step"), (Unchecked, "step")],
    ids=[*ANSWERS, "step-reply", "step-tool", "step-arguments"],
)
async def test_a_default_plugin_without_one_hook_fails_a_test(floor, hook, monkeypatch, request, tmp_path, made):
    assert await failing(hook, request) == []
    monkeypatch.setattr(environment, "DefaultPlugin", floor)
    assert await failing(hook, request), f"no test notices a floor without this answer of {hook!r}"
