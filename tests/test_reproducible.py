"""The same split, seed and settings give the same rows, in every process."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import pytest

ROWS = """
import sys
from itertools import islice
from gymsdk import load
from gymsdk.jsonl import dump_row
for task in islice(load(sys.argv[1]).tasks("train", seed=3), 400):
    sys.stdout.buffer.write(dump_row(task.row()))
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["math", "multineedle", "tool_call"])
def test_rows_do_not_depend_on_hash_randomization(name):
    drawn = {
        hashlib.sha256(
            subprocess.run(
                [sys.executable, "-c", ROWS, name],
                env=os.environ | {"PYTHONHASHSEED": seed},
                capture_output=True,
                check=True,
            ).stdout
        ).hexdigest()
        for seed in ("0", "1", "2")
    }
    assert len(drawn) == 1
