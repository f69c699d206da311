from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from sums_environment import PLAIN

from cli.conftest import Command, Start


@pytest.fixture(autouse=True)
def _disable_included_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GYMSDK_DISABLE", "math,tool_call,multineedle")


def test_every_environment_is_listed_with_its_package(gymsdk: Command) -> None:
    assert gymsdk("list").out == "sums  env_sums 1.0  Made.\n"
    (listed,) = json.loads(gymsdk("list", "--json").out)
    assert (listed["name"], listed["distribution"], listed["error"]) == ("sums", "env_sums", None)


def test_a_broken_environment_is_listed_with_its_error(gymsdk: Command, installed: Callable[..., Path]) -> None:
    installed("torn", "import nothing_of_that_name\n")
    assert "nothing_of_that_name" not in gymsdk("list").out
    result = gymsdk("list", "--load")
    assert "torn" in result.out
    assert "broken: " in result.out
    assert "nothing_of_that_name" in result.out
    assert result.code == 1


def test_an_environment_that_needs_a_setting_is_not_broken(gymsdk: Command, installed: Callable[..., Path]) -> None:
    setting = "class Settings(Config):\n    who: str\n\n@hookimpl\ndef reset(config: Settings): ...\n"
    installed("asking", PLAIN + setting)
    assert "broken" not in gymsdk("list", "--load").out


def test_an_empty_list_says_how_to_install_an_environment(gymsdk: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GYMSDK_DISABLE", "math,tool_call,multineedle,sums")
    assert (
        gymsdk("list").out == "No environment is installed. Install one, for example with `pip install gym-env-math`.\n"
    )


@pytest.mark.slow
def test_listing_imports_no_environment(start: Start, tmp_path: Path) -> None:
    (tmp_path / "site" / "env_sums.py").write_text("raise SystemExit('imported')\n")
    out, err = start("list").communicate(timeout=30)
    assert (out, err) == ("sums  env_sums 1.0  Made.\n", "")
