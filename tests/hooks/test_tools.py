"""The `tools` hook: its arguments, its valid results, and the failures of invalid results."""

from __future__ import annotations

import pytest

from gymsdk import BrokenEnvironment, Environment, hookimpl

from .environments import Judge, Settings, Tooled, go, stop


def test_tools_are_offered_by_name():
    assert list(Environment("tooled", Tooled()).tools) == ["go", "stop"]


def test_tools_of_several_hooks_are_merged():
    class More(Tooled):
        @hookimpl(specname="tools")
        def more(self):
            return [test_tools_are_offered_by_name]

    assert list(Environment("more", More()).tools) == ["go", "stop", "test_tools_are_offered_by_name"]


def test_tools_may_depend_on_the_config():
    class Some(Judge):
        @hookimpl
        def tools(self, config: Settings):
            return [go, stop][: config.level]

    assert list(Environment("some", Some(), {"level": 1}).tools) == ["go"]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda: [go, go], "two tools are named 'go'"),
        (lambda: ["go"], "tool 'go' has no name that a policy could call; write it as a named function"),
        (lambda: 5, "hook 'tools' returned int, expected a list of functions"),
        (lambda: go, "hook 'tools' returned function, expected a list of functions"),
        (lambda: 1 / 0, "hook 'tools' raised ZeroDivisionError: division by zero"),
    ],
)
def test_invalid_tools_are_an_error_at_load(answer, message):
    class Wrong(Judge):
        @hookimpl
        def tools(self):
            return answer()

    with pytest.raises(BrokenEnvironment) as caught:
        Environment("wrong", Wrong())
    assert str(caught.value).split(" (test_tools.py:")[0] == f"environment 'wrong': {message}"
