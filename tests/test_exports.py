"""The public names of the root package: they exist, have docstrings, and are cheap to import."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.version import Version

import gymsdk

HEAVY = {"aiohttp", "asyncio", "fastapi", "gymnasium", "httpx", "math_verify", "matplotlib", "multiprocessing", "numpy"}
HEAVY |= {"omegaconf", "openai", "pebble", "prometheus_client", "pydantic", "ray", "rich", "sympy", "typer", "uvicorn"}
NOT_FOR_THE_LIST = HEAVY - {"asyncio", "multiprocessing", "pydantic", "typer"}
ENVIRONMENTS = ("gym_env_math", "gym_env_multineedle", "gym_env_tool_call")
REFERENCE = Path(__file__).parent.parent / "docs" / "reference.md"

LOOK = """
import json, os, sys, threading
import {module}
try:
    os.waitpid(-1, os.WNOHANG)
    children = True
except ChildProcessError:
    children = False
print(json.dumps({{"modules": sorted(sys.modules), "threads": threading.active_count(), "children": children}}))
"""


def imported(module: str) -> set[str]:
    """Return the packages that an import of *module* loads, which must print nothing and start nothing."""
    command = [sys.executable, "-W", "error", "-c", LOOK.format(module=module)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(ran.stdout)
    assert (ran.stderr, found["threads"], found["children"]) == ("", 1, False)
    return {name.partition(".")[0] for name in found["modules"]}


@pytest.mark.parametrize("name", gymsdk.__all__)
def test_every_public_name_is_on_the_page_of_the_api(name: str) -> None:
    assert re.search(rf"^::: gymsdk\.(\w+\.)*{name}(\.\w+)*$|`{name}`", REFERENCE.read_text(), re.MULTILINE)
    assert inspect.getdoc(getattr(gymsdk, name)), "the page shows the docstring"


def test_public_names_are_sorted_and_about_thirty_at_most() -> None:
    assert gymsdk.__all__ == sorted(set(gymsdk.__all__))
    assert 20 < len(gymsdk.__all__) <= 32
    assert set(gymsdk.__all__) <= set(dir(gymsdk))
    with pytest.raises(AttributeError, match="no attribute 'nothing_of_the_kind'"):
        _ = gymsdk.nothing_of_the_kind


def test_importing_gymsdk_imports_nothing_heavy() -> None:
    assert imported("gymsdk") & HEAVY == set()


@pytest.mark.skipif(Version(version("typer")) < Version("0.26"), reason="older versions of typer import Rich at once")
def test_the_command_line_imports_nothing_heavy_before_a_command_needs_it() -> None:
    assert imported("gymsdk.cli") & NOT_FOR_THE_LIST == set()


def test_a_package_opens_with_a_sentence_and_importing_an_environment_is_cheap() -> None:
    found = imported(", ".join(ENVIRONMENTS))
    for module in ("gymsdk", *ENVIRONMENTS):
        assert (importlib.import_module(module).__doc__ or "").strip().split("\n")[0].endswith(".")
    assert found & {"sympy", "math_verify", "numpy", "gymnasium", "fastapi", "openai", "aiohttp"} == set()
