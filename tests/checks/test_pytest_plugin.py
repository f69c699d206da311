"""The pytest plugin, in separate pytest processes: one test per check, and the fixture."""

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
"""Source of an environment that rewards every reply."""

QUIET = ("-p", "no:cacheprovider", "-o", "asyncio_default_fixture_loop_scope=function")


@pytest.fixture
def workdir(tmp_path: Path) -> Path:
    folder = tmp_path / "there"
    folder.mkdir()
    return folder


@pytest.fixture
def run_pytest(site, workdir) -> Pytest:
    """Return a function that runs pytest in an empty folder, with `sums` and `greedy` installed."""
    site.install("sums", _complete(SUMS))
    site.install("greedy", _complete(GREEDY))

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pytest", *QUIET, *arguments]
        return subprocess.run(command, cwd=workdir, capture_output=True, text=True, timeout=100, check=False)

    return run


def _complete(source: str) -> str:
    from .conftest import HEADER

    return (HEADER + source).replace("digits: int = 3", 'digits: int = Field(3, description="How many.")')


def test_every_check_is_a_test(run_pytest):
    from gymsdk.checks.run import CHECKS

    result = run_pytest("--gymsdk", "sums", "-W", "error", "-o", "asyncio_mode=auto")
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"collected {len(CHECKS)} items" in result.stdout


def test_settings_reach_the_environments_they_name(run_pytest, site):
    site.install("needy", _complete(SUMS).replace("Field(3, ", "Field("))
    arguments = ("--gymsdk", "sums", "--gymsdk", "needy", "-k", "runtime.load")
    output = " ".join(run_pytest(*arguments).stdout.split())
    assert "pass the missing settings with --set (in pytest with --gymsdk-set" in output
    assert "2 passed" in run_pytest(*arguments, "--gymsdk-set", "needy.digits=2").stdout
    output = run_pytest(*arguments, "--gymsdk-set", "needy.digts=2").stdout
    assert "did you mean 'digits'?" in output
    assert "run.py" not in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--gymsdk", "smus"), "ERROR: --gymsdk smus: no environment named 'smus'; did you mean 'sums'?"),
        (
            ("--gymsdk", "sums", "--gymsdk", "greedy", "--gymsdk-set", "digits=2"),
            "--gymsdk-set digits: write it as NAME.KEY=VALUE",
        ),
    ],
)
def test_wrong_options_are_usage_errors(run_pytest, arguments, message):
    result = run_pytest(*arguments)
    assert (result.returncode, message in result.stderr) == (4, True)


def test_checks_of_several_environments_are_selected_by_name_and_reported(run_pytest, workdir):
    selected = ("-v", "-rs", "-k", "floor_gap or page or tool_schemas", "--junitxml=cases.xml")
    result = run_pytest("--gymsdk", "sums", "--gymsdk", "greedy", *selected)
    assert result.returncode == 1
    assert "gymsdk-sums::semantic.floor_gap PASSED" in result.stdout
    assert "gymsdk-greedy::semantic.floor_gap FAILED" in result.stdout
    assert "1 failed, 3 passed, 2 skipped" in result.stdout
    assert "it has no tools" in result.stdout
    # The failure is reported without a traceback.
    assert "a policy that understands nothing earns no more than the claimed chance" in result.stdout
    assert all(f"\n      {word}:" in result.stdout for word in ("problem", "why", "fix"))
    assert "Traceback" not in result.stdout
    assert ".py" not in result.stdout.partition("FAILURES")[2].partition("short test summary")[0]
    cases = ET.parse(workdir / "cases.xml").iter("testcase")
    failed = [case.get("name") for case in cases if case.find("failure") is not None]
    assert failed == ["semantic.floor_gap"]


def test_an_environment_that_does_not_load_fails(run_pytest, site):
    site.install("torn", "1 / 0")
    result = run_pytest("--gymsdk", "torn", "-k", "runtime")
    assert result.returncode == 1
    assert "ZeroDivisionError" in result.stdout
    assert "1 failed" in result.stdout


def test_the_fixture_runs_checks_inside_a_test(run_pytest, workdir):
    (workdir / "test_it.py").write_text("""
def test_all_is_well(gymsdk_check):
    assert gymsdk_check("sums", only=["runtime.load", "semantic.floor_gap"], digits=2).passed

async def test_not_all_is_well(gymsdk_check):
    gymsdk_check("greedy", only=["semantic"], skip=["semantic.oracle_max"])

def test_a_setting_is_misspelt(gymsdk_check):
    gymsdk_check("sums", only="runtime.rows", digts=2)
""")
    result = run_pytest("-W", "error", "-o", "asyncio_mode=auto")
    assert "2 failed, 1 passed" in result.stdout
    assert "FAIL  semantic.floor_gap" in result.stdout
    assert "semantic.oracle_max" not in result.stdout
    assert "gymsdk_check('sums'): " in result.stdout
    assert "did you mean 'digits'?" in result.stdout
    assert "pytest_plugin.py" not in result.stdout


def test_the_unused_plugin_imports_nothing_else_of_gymsdk(run_pytest, workdir):
    (workdir / "test_it.py").write_text("""
import sys

def test_it():
    ours = {name for name in sys.modules if name.split(".")[0] == "gymsdk"}
    assert ours <= {"gymsdk", "gymsdk.checks", "gymsdk.checks.pytest_plugin"}
    assert "pydantic" not in sys.modules
""")
    assert run_pytest("-W", "error").returncode == 0
