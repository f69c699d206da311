"""Thousands of mutated requests, to all servers: none fails because of a request."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent.parent / "benchmarks" / "fuzz.py"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_server_fails_because_of_a_request() -> None:
    # Another seed than that of the benchmark, so that both together play more cases.
    command = [sys.executable, str(SCRIPT), "--requests", "4000", "--seed", "1000", "--step", "5"]
    played = subprocess.run(command, capture_output=True, text=True, check=False)
    assert played.returncode == 0, played.stdout + played.stderr
    assert "0 failures" in played.stdout
