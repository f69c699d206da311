"""The table is whole: every row is tried by a test, and what is not run says why."""

from __future__ import annotations

import tomllib

import pytest

from seeds.page import ROOT, TABLE, tried
from seeds.place import COMMANDS

NOT_RUN = {18, 22, 23, 24, 25}
"""What fetches NeMo Gym or gigabytes, or needs Docker or a GPU."""


def test_the_rows_are_numbered_one_after_another() -> None:
    assert list(TABLE) == list(range(1, 49))


def test_every_row_is_tried_by_a_test() -> None:
    assert sorted(set(tried())) == sorted(TABLE)


def test_what_is_not_run_says_so_and_nothing_else_does() -> None:
    said = {number for number, line in TABLE.items() if line.differs.startswith(("Not run", "Not built"))}
    assert said == NOT_RUN


def test_every_row_has_a_counterpart() -> None:
    assert [
        number
        for number, line in TABLE.items()
        if not line.theirs and number not in {11, 13, 16, 17, 27, 36, 44, 46, 48}
    ] == []


@pytest.mark.skipif(not (ROOT / "compat").is_dir(), reason="the sources are not in reach of tests of the wheels")
def test_the_commands_are_those_of_the_distribution() -> None:
    scripts = tomllib.loads((ROOT / "compat" / "pyproject.toml").read_text())["project"]["scripts"]
    assert set(scripts) == {"ng_run", "ng_status", "ng_collect_rollouts"}
    assert [name for name in scripts if not (COMMANDS / name).exists()] == [], "install the checkout anew"
