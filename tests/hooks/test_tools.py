"""The `tools` hook: its arguments, its valid results, and the failures of invalid results."""

from __future__ import annotations

import pytest

from gymsdk import BrokenEnvironment, Environment, hookimpl

from .environments import Judge, Settings, Tooled, go


def test_tools_of_several_hooks_are_merged_and_may_depend_on_the_config():
    def up(): ...

    def down(): ...

    class More(Tooled):
        @hookimpl(specname="tools")
        def more(self, config: Settings):
            return [up, down][: config.level]

    assert list(Environment("tooled", Tooled()).tools) == ["go", "stop"]
    assert list(Environment("more", More(), {"level": 1}).tools) == ["go", "stop", "up"]


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
