"""Each broken environment of the corpus fails its check, and the healthy ones pass all checks."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from gymsdk.checks import loading, oracle
from gymsdk.checks.report import Check
from gymsdk.checks.run import CHECKS, FAMILIES, CheckRun, select_checks
from gymsdk.checks.subject import build_subject

from .healthy import BASES

FOLDER = Path(__file__).parent / "corpus"
HEALTHY = "healthy"
CASES = sorted(path.stem for path in FOLDER.glob("*.py"))
BROKEN = [case for case in CASES if not case.startswith(HEALTHY)]
SETTINGS = {"healthy_setting": {"level": 8}}
CHEAP = (loading, oracle)
"""Families of checks that cost little; every broken environment runs them too."""

SELECTED = {"healthy_slow": ("runtime.episode_isolation", "semantic.floor_gap", "runtime.close_once")}
"""The checks of a slow environment: these must not report slow episodes as defects, and play fewer episodes."""

CHECK_SECONDS = 2.0
"""The number of seconds that the episodes of one check should take here."""

OPENING = re.compile(r'^"""Fails ([\w.]+)(?: \(and ([\w.,\s]+)\))?: ', re.MULTILINE)
"""The start of the docstring of a broken environment: the check that fails, and checks that may fail with it."""

BASE = re.compile(r"^from checks\.bases\.(\w+) import \*$", re.MULTILINE)
"""The line of a case that names its base: the definitions that it does not replace."""


@cache
def read_source(case: str) -> str:
    """Return the source of *case* after that of the base that it imports."""
    # A class of the base may be replaced after a hook that names it.
    source = f"from __future__ import annotations\n{(FOLDER / f'{case}.py').read_text()}"
    while base := BASE.search(source):
        source = source.replace(base[0], (BASES / f"{base[1]}.py").read_text())
    return source


def parse_expected(case: str) -> tuple[str, set[str]]:
    """Return the check that *case* fails, and the checks that may fail too."""
    found = OPENING.search(read_source(case))
    assert found, f"{case}.py does not begin with the check that fails"
    return found[1], set(re.findall(r"[\w.]+", found[2] or ""))


def read_files(case: str) -> dict[str, str]:
    """Return the files in the folder with the name of the case: files of its package and of its `.dist-info`."""
    folder = FOLDER / case
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}


def select_for(own: str) -> list[Check]:
    """Return the checks to run on a case that is broken for the check *own*: its family and the cheap families."""
    [family] = (family for family in FAMILIES if own in {check.id for check in family.CHECKS})
    ids = {check.id for chosen in (family, *CHEAP) for check in chosen.CHECKS}
    return [check for check in CHECKS if check.id in ids]


@pytest.mark.parametrize("case", BROKEN)
async def test_each_broken_environment_fails_its_check(case, subject):
    own, companions = parse_expected(case)
    case_subject = subject(read_source(case), files=read_files(case))
    report = await CheckRun(case_subject).report(select_for(own))
    failed = {
        result.id: [finding.problem for finding in result.findings] for result in report.results if result.findings
    }
    assert own in failed
    assert failed.keys() - {own} <= companions, failed


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith(HEALTHY)])
async def test_healthy_environments_pass_every_check(case, subject):
    case_subject = subject(read_source(case), files=read_files(case), **SETTINGS.get(case, {}))
    case_subject.check_seconds = CHECK_SECONDS
    # The packages are all built alike, and each packaging check starts an interpreter, so one case runs them.
    report = await CheckRun(case_subject).report(
        select_checks(SELECTED.get(case, ()), [] if case == HEALTHY else ["packaging"])
    )
    assert [(result.id, result.findings) for result in report.results if result.status == "failed"] == []


@pytest.mark.parametrize("name", ["math", "multineedle", "tool_call"])
async def test_the_real_environments_pass_every_check(name):
    report = await CheckRun(build_subject(name, {}, count=4)).report(CHECKS)
    assert [(result.id, result.findings) for result in report.results if result.status == "failed"] == []


def test_every_check_has_a_broken_environment():
    assert sorted({check.id for check in CHECKS} - {parse_expected(case)[0] for case in BROKEN}) == []


def test_the_corpus_has_at_least_25_broken_environments():
    assert len(BROKEN) >= 25
