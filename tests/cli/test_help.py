"""The help of the commands: panels of options, examples, and the commands to start with."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from typing import Any

import click
import pytest
import typer

from cli.conftest import Command
from gymsdk.cli import COMMANDS as LAZY_COMMANDS
from gymsdk.cli import app
from gymsdk.cli.group import START

ROOT: Any = typer.main.get_command(app)
COMMANDS: dict[str, Any] = {
    **{name: command for name, command in ROOT.commands.items() if name not in {"policy", "tokens", "trainer"}},
    "policy serve": ROOT.commands["policy"].commands["serve"],
    "tokens check": ROOT.commands["tokens"].commands["check"],
    "trainer check": ROOT.commands["trainer"].commands["check"],
}

WIDE_EXAMPLES = {"show", "replay", "trainer check"}
"""The commands with examples of more than 80 columns."""


def test_the_help_begins_with_the_commands_to_start_with(gymsdk: Command) -> None:
    first, *_ = gymsdk("--help").out.partition("Environments:")
    assert all(command in first for command, _ in START)
    assert [command.split()[1] in COMMANDS for command, _ in START] == [True] * 3


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_every_command_ends_with_valid_examples(gymsdk: Command, name: str) -> None:
    examples = gymsdk(*name.split(), "--help").out.partition("\nExamples:\n")[2].splitlines()
    assert 1 <= len(examples) <= 3
    options = {option for parameter in COMMANDS[name].params for option in parameter.opts}
    for example in examples:
        arguments = shlex.split(example)
        assert " ".join(arguments).startswith(f"gymsdk {name}")
        assert {word for word in arguments if word.startswith("--")} <= options


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_with_many_options_groups_all_options_except_help_within_80_columns(
    gymsdk: Command, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    out = gymsdk(*name.split(), "--help").out
    if name not in WIDE_EXAMPLES:
        assert max(map(len, out.splitlines())) <= 80
    headings = re.findall(r"^(\S[\w ]*):$", out, re.MULTILINE)
    if "Options" in headings:
        assert len(re.findall(r"^  (?:-\w, )?--", out, re.MULTILINE)) <= 5
    else:
        other = out.partition("\nOther options:\n")[2].partition("\n\n")[0]
        assert re.findall(r"^  \S+", other, re.MULTILINE) == ["  --help"]


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_every_option_starts_with_a_capital_and_ends_with_a_full_stop(name: str) -> None:
    for parameter in COMMANDS[name].params:
        text = getattr(parameter, "help", None)
        if text and not getattr(parameter, "hidden", False):
            assert text[0].isupper(), parameter.name
            assert text.endswith("."), parameter.name


def test_the_help_is_plain_text(gymsdk: Command) -> None:
    out = click.unstyle(gymsdk("serve", "--help").out)
    assert out.isascii()


def test_the_summary_of_each_command_fits_into_one_line(gymsdk: Command) -> None:
    lines = gymsdk("--help").out.splitlines()
    assert [line for line in lines if line.endswith("...") and line.startswith("  ")] == []


@pytest.mark.parametrize("name", ROOT.commands)
def test_the_summary_in_the_list_of_commands_is_the_first_sentence_of_the_help(name: str) -> None:
    assert LAZY_COMMANDS[name].summary == ROOT.commands[name].get_short_help_str(100)


def test_the_help_imports_no_module_of_a_command_and_no_heavy_library() -> None:
    heavy = {"pydantic", "aiohttp", "orjson", "gymsdk.cli.serve", "rich", "matplotlib", "openai", "sympy", "numpy"}
    code = (
        "import sys; from gymsdk.cli import app; app(['--help'], standalone_mode=False);"
        f"sys.exit(str(sorted({heavy | {'gymnasium', 'pebble', 'fastapi'}} & sys.modules.keys())))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert found.stderr.strip() == "[]"
