"""The table of `docs/performance.md` and the script that fills it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "benchmarks" / "performance.py"


def run_script(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)


def test_the_page_lists_the_rows_that_the_script_measures() -> None:
    pytest.importorskip("uvloop")
    rejected = run_script("--row", "none").stderr
    rows = re.findall(r"'?([\w-]+)'?", rejected.rpartition("choose from ")[2])
    documented = re.findall(r"--row ([\w-]+)", (ROOT / "docs" / "performance.md").read_text())
    assert documented == rows


@pytest.mark.slow
def test_one_row_is_measured_next_to_the_floor(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    completed = run_script("--row", "turns", "--scale", "0.1", "--repeats", "1", "--json", str(figures))
    assert completed.returncode in {0, 1}, completed.stderr
    measured = json.loads(figures.read_text())
    assert {figure["row"] for figure in measured} == {"turns"}
    assert measured[0]["value"] > measured[0]["floor"] > 0
    assert completed.returncode == int(not all(figure["is_within_limit"] for figure in measured))
    assert [figure["value"] for figure in measured if figure["name"] == "failed episodes"] == [0]
