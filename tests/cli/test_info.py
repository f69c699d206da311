from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from sums_environment import PLAIN

from cli.conftest import Command

SOURCE = f'''
from __future__ import annotations
{PLAIN}
class Settings(Config):
    mode: Literal["plain", "words"] = Field("plain", description="How it asks.")
    sizes: tuple[int, ...] = (1, 2)
    judge: Model | None = None

class Row(Task):
    answer: int | str
    hints: dict[str, list[float]] = {{}}

@hookimpl
def tasks(split: Literal["train", "test"], config: Settings):
    yield Row.ask("What is it? " * 100, answer=3)

@hookimpl
def tools(config: Settings):
    def find(what: str, most: int = 3) -> str:
        """Find something.

        At length.
        """
        return what

    return [find]

@hookimpl
def verify(task: Row):
    return Verdict(reward=0.0)
'''


def test_info_prints_types_as_source_code(gymsdk: Command, installed: Callable[..., Path]) -> None:
    installed("shown", SOURCE)
    out = gymsdk("info", "shown").out
    assert out.startswith("shown (env_shown 1.0)\nMade.\n\nsplits: train, test\n")
    for line in (
        "  mode: 'plain' | 'words' = \"plain\"  # How it asks.",
        "  sizes: tuple[int, ...] = [1,2]",
        "  judge: Model | None = null",
        "  answer: int | str",
        "  hints: dict[str, list[float]] = {}",
        "  find(what, most): Find something.",
    ):
        assert f"{line}\n" in out
    assert "  user: What is it? " in out
    assert out.endswith("… (1200 characters)\n")


def test_json_output_has_splits_settings_tools_and_the_first_task(
    gymsdk: Command, installed: Callable[..., Path]
) -> None:
    installed("shown", SOURCE)
    output = json.loads(gymsdk("info", "shown", "--json").out)
    assert output["splits"] == ["train", "test"]
    assert output["settings"][1] == {
        "name": "sizes",
        "type": "tuple[int, ...]",
        "required": False,
        "default": [1, 2],
        "description": None,
    }
    assert output["tools"][0]["name"] == "find"
    assert output["first task"][0]["role"] == "user"


def test_settings_affect_the_first_task(gymsdk: Command) -> None:
    short, long = (gymsdk("info", "sums", "--set", f"digits={digits}").out for digits in (1, 9))
    assert short.split("first task")[1] != long.split("first task")[1]


def test_an_environment_without_tasks_or_tools_is_described(gymsdk: Command, installed: Callable[..., Path]) -> None:
    installed("bare", "from gymsdk import *\n@hookimpl\ndef verify():\n    return Verdict(reward=0.0)\n")
    out = gymsdk("info", "bare").out
    assert "splits: none\n\nsettings: none\n" in out
    assert out.endswith("\ntools: none\n")


def test_a_broken_environment_is_reported_in_one_sentence(gymsdk: Command, installed: Callable[..., Path]) -> None:
    installed("torn", "import nothing_of_that_name\n")
    result = gymsdk("info", "torn")
    assert "nothing_of_that_name" in result.err
    assert (result.code, result.err.count("\n")) == (1, 1)
