"""Every row of the table is covered by a test, and rows that no test runs say why."""

from __future__ import annotations

import tomllib

import pytest

from migration.page import ROOT, TABLE, list_covered
from migration.workspace import COMMANDS

NOT_RUN = {18, 22, 23, 24, 25}
"""Rows that would download NeMo Gym or gigabytes, or need Docker or a GPU."""


def test_the_rows_are_numbered_consecutively() -> None:
    assert list(TABLE) == list(range(1, 49))


def test_every_row_is_covered_by_a_test() -> None:
    assert sorted(set(list_covered())) == sorted(TABLE)


def test_only_rows_that_are_not_run_say_so() -> None:
    marked = {number for number, line in TABLE.items() if line.differs.startswith(("Not tested", "Not built"))}
    assert marked == NOT_RUN


def test_every_row_has_a_counterpart() -> None:
    assert [
        number
        for number, line in TABLE.items()
        if not line.nemo_gym and number not in {11, 13, 16, 17, 27, 36, 44, 46, 48}
    ] == []


@pytest.mark.skipif(not (ROOT / "compat").is_dir(), reason="the sources are not in reach of tests of the wheels")
def test_the_commands_are_those_of_the_distribution() -> None:
    scripts = tomllib.loads((ROOT / "compat" / "pyproject.toml").read_text())["project"]["scripts"]
    old = {"run", "status", "collect_rollouts"}
    assert set(scripts) == {"gym", "ng"} | {f"ng_{name}" for name in old} | {f"nemo_gym_{name}" for name in old}
    assert [name for name in scripts if not (COMMANDS / name).exists()] == [], "install the checkout anew"
