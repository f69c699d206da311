"""The steps of `.ci`: a failed step counts as failed regardless of the output of its tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

STEPS = Path(__file__).parents[1] / ".ci" / "steps.sh"


def verdict(line: str, folder: Path, body: str = "") -> tuple[int, list[str]]:
    """The exit code and the last lines of a set that is one *line*, after the functions in *body*."""
    script = folder / "set.sh"
    script.write_text(f"source '{STEPS}'\n{body}\n{line}\nverdict\n")
    ended = subprocess.run(["bash", script], capture_output=True, text=True, timeout=60, check=False)
    return ended.returncode, ended.stdout.splitlines()[-2:]


@pytest.mark.parametrize(
    ("body", "told", "code"),
    [
        ("echo '10 passed, 1 warning in 3.0s'", "10 passed, 0 failed", 0),
        ("echo '10 passed in 3.0s'; return 139", "0 passed, 1 failed", 1),
        ("echo '8 passed, 2 errors in 3.0s'; return 1", "8 passed, 2 failed", 1),
        ("echo '1 passed, 6 failed in 3.0s'; return 1", "1 passed, 6 failed", 1),
        ("echo no tests", "0 passed, 1 failed", 1),
        ("return 1", "0 passed, 1 failed", 1),
        ("sleep 60", "0 passed, 1 failed", 1),
    ],
)
def test_a_suite_counts_its_tests_and_what_went_wrong_beside_them(
    tmp_path: Path, body: str, told: str, code: int
) -> None:
    ended = verdict("suite some 5 . python tests", tmp_path, f"tests() {{ {body}; }}")
    assert (ended[0], ended[1][-1]) == (code, told)


@pytest.mark.parametrize(("always", "told"), [("False", "2 passed, 0 failed"), ("True", "1 passed, 1 failed")])
def test_a_few_that_failed_are_run_again_alone_and_that_is_told(tmp_path: Path, always: str, told: str) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_some.py").write_text(
        "from pathlib import Path\n\n"
        "def test_sound():\n    pass\n\n"
        "def test_not_the_first_time():\n"
        "    seen = Path('seen').exists()\n    Path('seen').touch()\n"
        f"    assert seen and not {always}\n"
    )
    words = f"'{tmp_path}' '{sys.executable}' in_folder '{tmp_path}' '{sys.executable}' -m pytest -ra"
    code, lines = verdict(f"suite some 60 {words}", tmp_path)
    assert (code, lines[-1]) == (int(always == "True"), told)
    assert (lines[0] == "1 of these passed only alone") is (always == "False")
