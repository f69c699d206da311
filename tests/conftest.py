"""Shared fixtures: policies with fixed turns, and environments built from source text."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import pytest
from sums_environment import SUMS

from gymsdk import Environment, Episode, Task, responses
from gymsdk.models.scripted import ScriptedModel

Said: TypeAlias = str | list[tuple[str, Any]] | list[dict[str, Any]]
"""One turn: a reply, tool calls (name and arguments), or complete output items."""

# A shell that runs the tests in the background makes the tests and their child processes ignore Ctrl-C. Undo this.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

SLOW = (
    "environments/math/tests/test_math_agreement.py",
    "tests/bench/test_bench.py",
    "tests/checks/test_answer_forms.py",
    "tests/checks/test_corpus.py",
    "tests/checks/test_execution.py",
    "tests/checks/test_pytest_plugin.py",
    "tests/checks/test_resources.py",
    "tests/cli/test_bench.py",
    "tests/cli/test_exit_codes.py",
    "tests/cli/test_descriptors.py",
    "tests/cli/test_secret_mistakes.py",
    "tests/cli/test_secret_options.py",
    "tests/cli/test_kill.py",
    "tests/cli/test_output.py",
    "tests/engine/test_launching.py",
    "tests/gym/test_vector_equality.py",
    "tests/models/test_bounded_answers.py",
    "tests/nemo_compat/test_collection.py",
    "tests/nemo_compat/test_gym_command.py",
    "tests/nemo_compat/test_run_helper.py",
    "tests/migration",
    "tests/programs",
    "tests/rollouts/test_delivery.py",
    "tests/rollouts/test_locks.py",
    "tests/servers/test_load_balancing.py",
    "tests/startup/test_breakage.py",
    "tests/studio/test_rollout_view.py",
    "tests/test_deploy.py",
    "tests/test_distributed.py",
    "tests/test_separate.py",
    "tests/test_serve_workers.py",
    "tests/test_template.py",
    "tests/test_working_folder.py",
)
"""Files and folders of the long set: their tests start many processes, install packages, or check every environment of
a corpus. They take three quarters of the time of all tests. `.ci/run` runs one of each kind by its name."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests of the long set as slow, and those that look at pages in Chromium as tests in a browser."""
    prefixes = tuple(str(config.rootpath / prefix) for prefix in SLOW)
    for item in items:
        if str(item.path).startswith(prefixes):
            item.add_marker(pytest.mark.slow)
        # Playwright leaves an event loop running in its thread, on which no later test could run its own.
        if "chromium" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.browser)


def pytest_collection_finish() -> None:
    """Leave the thousands of collected tests out of garbage collections: a run of rollouts begins with a complete one,
    which would take a second."""
    gc.collect()
    gc.freeze()


HEADER = """
from __future__ import annotations
import asyncio
from typing import Annotated, Any, Literal
from gymsdk import *
"""


def _items(content: Said, turn: int) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [responses.build_message(content, id=f"msg_{turn}")]
    return [
        item
        if isinstance(item, dict)
        else responses.build_function_call(item[0], item[1], f"call_{turn}_{number}", id=f"fc_{turn}_{number}")
        for number, item in enumerate(content)
    ]


@pytest.fixture
def policy() -> Callable[..., ScriptedModel]:
    """Return a function that builds a policy with fixed turns; it repeats the last turn. Use one policy per episode."""

    def make(*turns: Said) -> ScriptedModel:
        turn = 0

        async def choose(request: dict[str, Any], episode: Episode | None) -> list[dict[str, Any]]:
            nonlocal turn
            turn += 1
            return _items(turns[min(turn, len(turns)) - 1], turn)

        return ScriptedModel("told", choose)

    return make


@pytest.fixture
def task() -> Task:
    return Task.ask("What is 40 + 2?")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ModuleType]:
    """Return a function that builds an importable module from source text; the test removes the module at its end."""

    def make(source: str, name: str = "made_here") -> ModuleType:
        module = ModuleType(name)
        monkeypatch.setitem(sys.modules, name, module)
        exec(compile(HEADER + source, f"{name}.py", "exec"), module.__dict__)
        return module

    return make


@pytest.fixture
def environment(made: Callable[..., ModuleType]) -> Callable[..., Environment]:
    """Return a function that builds an environment from source text and settings."""

    def make(source: str, /, **settings: Any) -> Environment:
        return Environment("made", made(source), settings)

    return make


@pytest.fixture
def stuck() -> Iterator[threading.Event]:
    """Return an event for code that hangs; the fixture sets the event at the end of the test."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """Return a function that installs an environment from source (default `SUMS`), also for child processes."""
    site, modules = tmp_path / "site", set()

    def install(name: str = "sums", source: str = SUMS, *, version: str = "1.0") -> Path:
        module = f"env_{name.replace('.', '_')}"
        modules.add(module)
        about = site / f"{module}-{version}.dist-info"
        about.mkdir(parents=True, exist_ok=True)
        (site / f"{module}.py").write_text(source)
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: {version}\nSummary: Made.\n")
        (about / "entry_points.txt").write_text(f"[gymsdk.environments]\n{name} = {module}\n")
        monkeypatch.syspath_prepend(site)
        monkeypatch.setenv("PYTHONPATH", str(site), prepend=os.pathsep)
        return site

    yield install
    for module in modules:
        sys.modules.pop(module, None)
