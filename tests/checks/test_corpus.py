"""Each broken environment of the corpus fails its check, and the healthy ones pass all checks."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from gymsdk.checks import describing, loading, oracle
from gymsdk.checks.report import Check
from gymsdk.checks.run import CHECKS, FAMILIES, CheckRun, select_checks
from gymsdk.checks.subject import build_subject

FOLDER = Path(__file__).parent / "corpus"
HEALTHY = "healthy"
CASES = sorted(path.stem for path in FOLDER.glob("*.py"))
BROKEN = [case for case in CASES if not case.startswith(HEALTHY)]
SETTINGS = {"healthy_setting": {"level": 8}}
QUICK = (loading, describing, oracle)
"""Families that cost little: each of the broken ones is held to these too."""

SIZED = {"healthy_slow": ("runtime.episode_isolation", "semantic.floor_gap", "runtime.close_once")}
"""The checks that a slow one is held to: those that used to take it for broken, and have to play less."""

PATIENCE = 2.0
"""Seconds that the episodes of one check should take here."""

OPENING = re.compile(r'^"""Fails ([\w.]+)(?: \(and ([\w.,\s]+)\))?: ')
"""How the docstring of a broken one begins: the check it fails, and those it cannot but fail with it."""


@cache
def source_of(case: str) -> str:
    return (FOLDER / f"{case}.py").read_text()


def meant(case: str) -> tuple[str, set[str]]:
    """Give the check that *case* fails, and those that may fail too."""
    found = OPENING.match(source_of(case))
    assert found, f"{case}.py begins with the check it fails"
    return found[1], set(re.findall(r"[\w.]+", found[2] or ""))


def files_of(case: str) -> dict[str, str]:
    """Give what stands in the folder of the same name: files of its package, and of its `.dist-info`."""
    folder = FOLDER / case
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}


def held_to(own: str) -> list[Check]:
    """Give the checks that a case broken for the check *own* is held to: those of its family, and the quick ones."""
    [family] = (family for family in FAMILIES if own in {check.id for check in family.CHECKS})
    ours = {check.id for each in (family, *QUICK) for check in each.CHECKS}
    return [check for check in CHECKS if check.id in ours]


@pytest.mark.parametrize("case", BROKEN)
async def test_each_broken_environment_fails_its_check(case, subject):
    own, companions = meant(case)
    made = subject(source_of(case), files=files_of(case))
    report = await CheckRun(made).report(held_to(own))
    failed = {result.id: [finding.seen for finding in result.findings] for result in report.results if result.findings}
    assert own in failed
    assert failed.keys() - {own} <= companions, failed


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith(HEALTHY)])
async def test_healthy_environments_pass_every_check(case, subject):
    made = subject(source_of(case), files=files_of(case), **SETTINGS.get(case, {}))
    made.check_seconds = PATIENCE
    # Another interpreter is started for each of the package's checks, and the packages are all made alike.
    report = await CheckRun(made).report(select_checks(SIZED.get(case, ()), [] if case == HEALTHY else ["packaging"]))
    assert [(result.id, result.findings) for result in report.results if result.status == "failed"] == []


@pytest.mark.parametrize("name", ["math", "multineedle", "tool_call"])
async def test_the_real_environments_pass_every_check(name):
    report = await CheckRun(build_subject(name, {}, count=4)).report(CHECKS)
    assert [(result.id, result.findings) for result in report.results if result.status == "failed"] == []


def test_every_check_has_a_broken_environment():
    assert sorted({check.id for check in CHECKS} - {meant(case)[0] for case in BROKEN}) == []


def test_there_are_many():
    assert len(BROKEN) >= 25
