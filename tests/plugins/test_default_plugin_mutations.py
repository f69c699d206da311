"""If one hook of the default plugin is removed, a test in `test_default_plugin` with the name of that hook fails."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator

import pytest

from gymsdk import Environment, Message, environment
from gymsdk.plugins.hooks import hookimpl
from gymsdk.plugins.results import DefaultPlugin

from . import test_default_plugin

HOOKS = [name for name, value in vars(DefaultPlugin).items() if hasattr(value, "gymsdk_impl")]


def without(hook: str) -> type[DefaultPlugin]:
    """Return a default plugin without *hook*."""
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
        state_argument = {"state": state} if "state" in self.toolbox[action.name].host_parameters else {}
        return test_default_plugin.Step(
            output=str(self.toolbox[action.name].function(**action.parsed(), **state_argument))
        )


def list_tests(hook: str) -> Iterator[Callable[..., object]]:
    return (value for name, value in vars(test_default_plugin).items() if name.startswith(f"test_{hook}"))


async def list_failing(hook: str, request: pytest.FixtureRequest) -> list[str]:
    """Return the names of the tests of *hook* that fail."""
    return [test.__name__ for test in list_tests(hook) if not await passes(test, request)]


async def passes(test: Callable[..., object], request: pytest.FixtureRequest) -> bool:
    fixtures = {name: request.getfixturevalue(name) for name in inspect.signature(test).parameters if name != "build"}
    try:
        outcome = test(build=lambda plugin: Environment("packing", plugin), **fixtures)
        if inspect.isawaitable(outcome):
            await outcome
    except (Exception, pytest.fail.Exception):  # noqa: BLE001  # a test may fail in any way
        return False
    return True


@pytest.mark.parametrize(
    ("default_plugin", "hook"),
    [*((without(hook), hook) for hook in HOOKS), (NoReply, "step"), (NoTool, "step"), (Unchecked, "step")],
    ids=[*HOOKS, "step-reply", "step-tool", "step-arguments"],
)
async def test_a_default_plugin_without_one_hook_fails_a_test(
    default_plugin, hook, monkeypatch, request, tmp_path, made
):
    assert await list_failing(hook, request) == []
    monkeypatch.setattr(environment, "DefaultPlugin", default_plugin)
    assert await list_failing(hook, request), f"no test fails with this defect in the default plugin's hook {hook!r}"
