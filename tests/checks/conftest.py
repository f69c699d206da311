"""Fixtures of the tests of checks: an environment from source, installed as a healthy package, as a subject."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from gymsdk import load
from gymsdk.checks import run
from gymsdk.checks.report import Result
from gymsdk.checks.subject import Subject
from gymsdk.plugins import registry

HEADER = """
from __future__ import annotations
import asyncio, random
from typing import Annotated, Any, Literal
from pydantic import Field
from gymsdk import *
"""

METADATA = """Metadata-Version: 2.4
Name: gym-env-{name}
Version: 1.0
Summary: Made for a test.
Requires-Python: >=3.11
License-Expression: MIT
Requires-Dist: gymsdk
Description-Content-Type: text/markdown

# {name}

An environment made of source for a test, which says here what its tasks are and how they are graded.
"""

ABOUT = {"METADATA", "RECORD", "entry_points.txt", "direct_url.json"}

Make: TypeAlias = Callable[..., Subject]
Outcome: TypeAlias = Callable[[str, Subject], Awaitable[Result]]


class Site:
    """A folder on the path that packages are installed into."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self._monkeypatch = monkeypatch
        self.reach(folder)

    def reach(self, folder: Path) -> None:
        """Put *folder* on the path, here and for the processes a test starts."""
        self._monkeypatch.syspath_prepend(folder)
        self._monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)

    def install(self, name: str, source: str, files: dict[str, str] | None = None) -> Path:
        """Install the environment *name* with the package *source* and *files*, and return its `.dist-info` folder.

        Files with names of that folder go there, with `{name}` replaced.
        """
        package = f"gym_env_{name}"
        given = {
            "METADATA": METADATA,
            "entry_points.txt": "[gymsdk.environments]\n{name} = gym_env_{name}\n",
            "__init__.py": source,
            "py.typed": "",
            **(files or {}),
        }
        about = self.folder / f"{package}-1.0.dist-info"
        targets = {path: (about if path in ABOUT else self.folder / package) / path for path in given}
        recorded = [home.relative_to(self.folder).as_posix() for home in targets.values()]
        given.setdefault("RECORD", "".join(f"{path},,\n" for path in [*recorded, f"{about.name}/RECORD"]))
        for path, text in given.items():
            target = targets.get(path, about / path)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text.replace("{name}", name) if path in ABOUT else text)
        importlib.invalidate_caches()
        return about


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """A folder on the path of this process and of child processes. Modules imported from it are removed afterwards."""
    folder = tmp_path / "site"
    folder.mkdir()
    yield Site(folder, monkeypatch)
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def subject(site: Site) -> Make:
    """Install *source* under a new name and return it as a subject with its settings.

    Source without a `from gymsdk import` line gets the usual one.
    """
    created = 0

    def build(source: str, /, *, count: int = 4, files: dict[str, str] | None = None, **settings: Any) -> Subject:
        nonlocal created
        created += 1
        name = f"made{created}"
        site.install(name, source if "from gymsdk import" in source else HEADER + source, files)
        [entry] = (entry for entry in registry.installed().values() if entry.module == f"gym_env_{name}")
        return Subject(entry.name, partial(load, entry.name, **settings), entry, count=count, settings=settings)

    return build


@pytest.fixture
def outcome() -> Outcome:
    """Return a function that runs the check with this id on a subject and returns its result."""

    async def run_check(check_id: str, subject: Subject) -> Result:
        [check] = run.select_checks([check_id])
        return await run.run_check(check, subject)

    return run_check
