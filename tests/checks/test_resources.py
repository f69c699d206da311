from __future__ import annotations

import os
import random
import sys
import tempfile
from pathlib import Path

import pytest

from .healthy import HEALTHY

RESOURCES, EFFECTS = "runtime.resources", "runtime.side_effects"


def opening_with(line: str) -> str:
    """Return the shelf with *line* at the start of every reset."""
    return HEALTHY.replace("async def reset():\n", f"async def reset(seed):\n    {line}\n").replace(
        "import random", "import asyncio, os, random, signal, subprocess, sys, tempfile, threading, warnings"
    )


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("threading.Thread(target=threading.Event().wait, args=(10,), name='w', daemon=True).start()", "threads"),
        ("KEPT.append(open(os.devnull))", "open files"),
        ("KEPT.append(subprocess.Popen(['sleep', '10']))", "processes"),
        ("KEPT.append(tempfile.mkdtemp())", "temporary files"),
        ("KEPT.append(asyncio.ensure_future(asyncio.sleep(10)))", "asyncio tasks"),
    ],
)
async def test_leaked_resources_are_named(subject, outcome, line, expected):
    shelf = subject(opening_with(line).replace("class Shelf", "KEPT = []\n\n\nclass Shelf"))
    try:
        result = await outcome(RESOURCES, shelf)
    finally:
        for kept in vars(shelf.environment.plugin)["KEPT"]:
            for release in ("kill", "wait", "cancel", "close"):
                getattr(kept, release, lambda: None)()
    assert f"24 {expected} behind" in result.findings[0].problem


async def test_a_single_new_resource_is_not_a_leak(subject, outcome):
    line = "KEPT or KEPT.append(tempfile.mkdtemp())"
    shelf = subject(opening_with(line).replace("class Shelf", "KEPT = []\n\n\nclass Shelf"))
    assert (await outcome(RESOURCES, shelf)).status == "passed"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("os.environ['SHELF'] = str(random.Random().random())", "os.environ"),
        ("os.environ['BOOKS'] = 'none'", "os.environ"),
        ("os.chdir('/')", "the current folder"),
        ("sys.path.append('shelf')", "sys.path"),
        ("random.random()", "global `random`"),
        ("random.seed(seed)", "global `random`"),
        ("warnings.filterwarnings('ignore', message=str(random.Random().random()))", "warnings.filters"),
        ("print('a shelf')", "printed 'a shelf"),
    ],
)
async def test_changed_process_state_is_named(subject, outcome, monkeypatch, line, expected):
    monkeypatch.setenv("SHELF", "empty")
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    with __import__("warnings").catch_warnings():
        result = await outcome(EFFECTS, subject(opening_with(line)))
    assert expected in result.findings[0].problem


async def test_process_state_is_restored(subject):
    folder = Path.cwd()
    async with subject(HEALTHY).enter_environment():
        os.chdir("/")
        os.environ["BOOKS"] = "none"
        sys.path.append("shelf")
    assert (Path.cwd(), "BOOKS" in os.environ, "shelf" in sys.path) == (folder, False, False)


async def test_a_check_passes_a_healthy_environment_and_does_not_change_process_state(subject, outcome):
    before = random.getstate(), tempfile.tempdir
    for check in (RESOURCES, EFFECTS):
        assert (await outcome(check, subject(HEALTHY))).status == "passed"
    assert (random.getstate(), tempfile.tempdir) == before


async def test_pool_threads_are_named_without_their_numbers(subject, outcome):
    line = "threading.Thread(target=threading.Event().wait, args=(10,), daemon=True).start()"
    result = await outcome(RESOURCES, subject(opening_with(line)))
    assert "such as thread 'Thread (wait)'" in result.findings[0].problem
