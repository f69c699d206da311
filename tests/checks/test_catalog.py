"""The catalog of checks, and its table in the documentation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gymsdk.checks import run
from gymsdk.checks.report import Check, Finding
from gymsdk.checks.run import CHECKS
from gymsdk.checks.subject import Subject
from gymsdk.errors import UsageError

PAGE = Path(__file__).resolve().parents[2] / "docs" / "checks.md"


async def find_nothing(subject: Subject) -> list[Finding]:
    return []


def build_table_row(check: Check) -> str:
    requirement = check.requirement.replace("|", "\\|")
    return f"| `{check.id}` | {requirement} |"


def test_check_ids_are_unique():
    ids = [check.id for check in CHECKS]
    assert sorted(set(ids)) == sorted(ids)


def test_the_table_in_the_documentation_equals_the_catalog():
    assert re.findall(r"^\| `.*$", PAGE.read_text(), re.MULTILINE) == [build_table_row(check) for check in CHECKS]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.id)
def test_the_texts_of_a_check_are_clauses(check):
    assert re.fullmatch(r"(packaging|runtime|semantic)\.[a-z_]+", check.id)
    for clause in (check.requirement, check.why, check.fix):
        assert clause
        assert not clause[0].isupper()
        assert not clause.endswith(".")


def test_checks_are_selected_by_id_and_by_family():
    chosen = [check.id for check in run.select_checks(["packaging", "runtime.load"], ["packaging.page"])]
    assert chosen == [
        "packaging.metadata",
        "packaging.entry_point",
        "packaging.files",
        "packaging.import",
        "runtime.load",
    ]
    assert [check.id for check in run.select_checks("runtime.rows")] == ["runtime.rows"]
    with pytest.raises(UsageError, match=r"no check has the id 'runtime.lod'; did you mean 'runtime.load'\?"):
        run.select_checks(["runtime.lod"])
    with pytest.raises(UsageError, match="no check is left"):
        run.select_checks(["runtime.rows"], ["runtime"])


def test_a_check_with_a_missing_package_says_what_to_install():
    check = Check(id="runtime.needy", requirement="", why="", fix="", run=find_nothing, needs=("not_there_at_all",))
    with pytest.raises(UsageError, match=r'run: pip install "gymsdk\[author\]"'):
        run.check_requirements([check])
