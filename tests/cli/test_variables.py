"""Environment variables that look like those of gymsdk."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gymsdk.settings import VARIABLES, list_unknown_variables

ROOT = Path(__file__).resolve().parents[2]


def run_with(**variables: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GYMSDK_")}
    command = [sys.executable, "-m", "gymsdk", "list"]
    return subprocess.run(command, env=environ | variables, capture_output=True, text=True, check=False)


def test_an_unknown_variable_is_named_and_changes_nothing_else() -> None:
    plain, odd = run_with(), run_with(GYMSDK_BASEURL="http://127.0.0.1:1/v1", GYMSDK_MODEL="m")
    assert (odd.returncode, odd.stdout) == (plain.returncode, plain.stdout) == (0, plain.stdout)
    line = "GYMSDK_BASEURL is not a variable of gymsdk and is ignored; did you mean 'GYMSDK_BASE_URL'?\n"
    assert (plain.stderr, odd.stderr) == ("", line)


def test_a_name_is_suggested_only_if_more_than_the_prefix_is_alike() -> None:
    assert run_with(GYMSDK_FOO="1").stderr == "GYMSDK_FOO is not a variable of gymsdk and is ignored\n"


@pytest.mark.parametrize(
    "name",
    ["GYMSDK_SERVICE_HOST", "GYMSDK_PORT", "GYMSDK_HEAD_SERVICE_PORT_HTTP", "GYMSDK_HEAD_PORT_11000_TCP_ADDR"],
)
def test_variables_of_kubernetes_are_not_named(name: str) -> None:
    assert list_unknown_variables([name, "GYMSDK_API_KEY", "HOME", "GYMSDK_PROT"]) == ["GYMSDK_PROT"]


def test_the_list_has_every_variable_that_the_code_reads() -> None:
    files = [*(ROOT / "gymsdk").rglob("*.py"), *(ROOT / "startup").glob("*.py")]
    read = {name for file in files for name in re.findall(r"\"(GYMSDK_[A-Z_]+)\"", file.read_text())}
    assert read == VARIABLES
