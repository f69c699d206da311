"""The steps of `.ci`: a failed step counts as failed regardless of the output of its tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

STEPS = Path(__file__).parents[1] / ".ci" / "steps.sh"


def run_step(line: str, folder: Path, body: str = "") -> tuple[int, list[str]]:
    """Run a script with the functions in *body* and one *line*; return its exit code and last lines."""
    script = folder / "set.sh"
    script.write_text(f"source '{STEPS}'\n{body}\n{line}\nverdict\n")
    result = subprocess.run(["bash", script], capture_output=True, text=True, timeout=60, check=False)
    return result.returncode, result.stdout.splitlines()[-2:]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "last_line", "code"),
    [
        ("echo '10 passed, 1 warning in 3.0s'", "10 passed, 0 failed", 0),
        ("echo '10 passed in 3.0s'; return 139", "0 passed, 1 failed", 1),
        ("echo '8 passed, 2 errors in 3.0s'; return 1", "8 passed, 2 failed", 1),
        ("echo no tests", "0 passed, 1 failed", 1),
        ("sleep 60", "0 passed, 1 failed", 1),
    ],
)
def test_a_suite_counts_its_tests_and_other_errors(tmp_path: Path, body: str, last_line: str, code: int) -> None:
    exit_code, lines = run_step("suite some 5 . python tests", tmp_path, f"tests() {{ {body}; }}")
    assert (exit_code, lines[-1]) == (code, last_line)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("always_fails", "last_line"), [("False", "2 passed, 0 failed"), ("True", "1 passed, 1 failed")]
)
def test_a_few_failed_tests_run_again_alone_and_are_reported(tmp_path: Path, always_fails: str, last_line: str) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_some.py").write_text(
        "from pathlib import Path\n\n"
        "def test_that_passes():\n    pass\n\n"
        "def test_that_fails_in_its_first_run():\n"
        "    ran_before = Path('ran').exists()\n    Path('ran').touch()\n"
        f"    assert ran_before and not {always_fails}\n"
    )
    arguments = f"'{tmp_path}' '{sys.executable}' in_folder '{tmp_path}' '{sys.executable}' -m pytest -ra"
    code, lines = run_step(f"suite some 60 {arguments}", tmp_path)
    assert (code, lines[-1]) == (int(always_fails == "True"), last_line)
    assert (lines[0] == "1 of these passed only alone") is (always_fails == "False")
