"""The pytest plugin, in separate pytest processes: tests per check, and the fixture."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from .test_run import SUMS

Pytest = Callable[..., "subprocess.CompletedProcess[str]"]

GREEDY = SUMS.replace("reward=float(transcript.reply.strip() == str(task.answer))", "reward=1.0")
"""An environment that pays whatever is said."""

QUIET = ("-p", "no:cacheprovider", "-o", "asyncio_default_fixture_loop_scope=function")


@pytest.fixture
def there(tmp_path: Path) -> Path:
    folder = tmp_path / "there"
    folder.mkdir()
    return folder


@pytest.fixture
def tested(site, there) -> Pytest:
    """Run pytest in an empty folder, `sums` and `greedy` installed."""
    site.install("sums", _whole(SUMS))
    site.install("greedy", _whole(GREEDY))

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pytest", *QUIET, *words]
        return subprocess.run(command, cwd=there, capture_output=True, text=True, timeout=100, check=False)

    return run


def _whole(source: str) -> str:
    from .conftest import HEADER

    return (HEADER + source).replace("digits: int = 3", 'digits: int = Field(3, description="How many.")')


def test_every_check_is_a_test(tested):
    from gymsdk.checks.run import CHECKS

    ended = tested("--gymsdk", "sums", "-W", "error", "-o", "asyncio_mode=auto")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"collected {len(CHECKS)} items" in ended.stdout


def test_settings_reach_the_environments_they_name(tested, site):
    site.install("needy", _whole(SUMS).replace("Field(3, ", "Field("))
    words = ("--gymsdk", "sums", "--gymsdk", "needy", "-k", "runtime.load")
    assert "pass the missing settings with --set (in pytest with --gymsdk-set" in " ".join(
        tested(*words).stdout.split()
    )
    assert "2 passed" in tested(*words, "--gymsdk-set", "needy.digits=2").stdout


def test_a_setting_without_an_environment_is_a_usage_error(tested):
    ended = tested("--gymsdk", "sums", "--gymsdk", "greedy", "--gymsdk-set", "digits=2")
    assert ended.returncode == 4
    assert "--gymsdk-set digits=2: write it as NAME.KEY=VALUE" in ended.stderr


def test_several_environments_are_checked_and_tests_chosen_by_their_names(tested):
    ended = tested("--gymsdk", "sums", "--gymsdk", "greedy", "-v", "-k", "floor_gap or page")
    assert ended.returncode == 1
    assert "gymsdk-sums::semantic.floor_gap PASSED" in ended.stdout
    assert "gymsdk-greedy::semantic.floor_gap FAILED" in ended.stdout
    assert "1 failed, 3 passed" in ended.stdout


def test_a_failure_is_reported_without_a_traceback(tested):
    told = tested("--gymsdk", "greedy", "-k", "floor_gap").stdout
    assert "a policy that understands nothing earns no more than the claimed chance" in told
    assert all(f"\n      {word}:" in told for word in ("seen", "why", "mend"))
    assert "Traceback" not in told
    assert ".py" not in told.partition("FAILURES")[2]


def test_a_skipped_check_gives_its_reason(tested):
    assert "it has no tools" in tested("--gymsdk", "sums", "-k", "tool_schemas", "-rs").stdout


def test_an_unknown_environment_is_a_mistake_of_usage(tested):
    ended = tested("--gymsdk", "smus")
    assert ended.returncode == 4
    assert ended.stderr.startswith("ERROR: --gymsdk smus: no environment named 'smus'; did you mean 'sums'?")


def test_an_environment_that_does_not_load_fails(tested, site):
    site.install("torn", "1 / 0")
    ended = tested("--gymsdk", "torn", "-k", "runtime")
    assert ended.returncode == 1
    assert "ZeroDivisionError" in ended.stdout
    assert "1 failed" in ended.stdout


def test_junit_has_a_case_for_each(tested, there):
    tested("--gymsdk", "greedy", "-k", "floor_gap or page", "--junitxml=cases.xml")
    cases = {case.get("name"): case.find("failure") is None for case in ET.parse(there / "cases.xml").iter("testcase")}
    assert cases == {"packaging.page": True, "semantic.floor_gap": False}


def test_the_fixture_checks_inside_a_test(tested, there):
    (there / "test_it.py").write_text("""
def test_all_is_well(gymsdk_check):
    assert gymsdk_check("sums", only=["runtime.load", "semantic.floor_gap"], digits=2).passed

async def test_not_all_is_well(gymsdk_check):
    gymsdk_check("greedy", only=["semantic"], skip=["semantic.oracle_max"])
""")
    ended = tested("-W", "error", "-o", "asyncio_mode=auto")
    assert "1 failed, 1 passed" in ended.stdout
    assert "FAIL  semantic.floor_gap" in ended.stdout
    assert "semantic.oracle_max" not in ended.stdout


def test_wrong_use_of_the_fixture_is_reported_in_one_sentence(tested, there):
    (there / "test_it.py").write_text("""
def test_it(gymsdk_check):
    gymsdk_check("sums", only="runtime.rows", digts=2)
""")
    told = tested("-W", "error").stdout
    assert "gymsdk_check('sums'): " in told
    assert "did you mean 'digits'?" in told
    assert "pytest_plugin.py" not in told


def test_a_misspelt_setting_is_reported_without_a_traceback(tested):
    told = tested("--gymsdk", "sums", "--gymsdk-set", "digts=2", "-k", "runtime.rows").stdout
    assert "did you mean 'digits'?" in told
    assert "run.py" not in told


def test_the_unused_plugin_imports_nothing_else_of_gymsdk(tested, there):
    (there / "test_it.py").write_text("""
import sys

def test_it():
    ours = {name for name in sys.modules if name.split(".")[0] == "gymsdk"}
    assert ours <= {"gymsdk", "gymsdk.checks", "gymsdk.checks.pytest_plugin"}
    assert "pydantic" not in sys.modules
""")
    assert tested("-W", "error").returncode == 0
