"""Worker processes for all tests of a module, and questions about processes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from gymsdk.workers.processes import ProcessExecutor


@pytest.fixture(scope="module")
def local() -> Iterator[ProcessExecutor]:
    workers = ProcessExecutor(2)
    yield workers
    workers.close()


async def read_note(note: Path) -> int:
    """Wait until another process has written a number to *note*, and return it."""
    async with asyncio.timeout(20):
        while not note.exists() or not note.read_text():  # noqa: ASYNC110, ASYNC240 - another process writes it
            await asyncio.sleep(0.01)
    return int(note.read_text())  # noqa: ASYNC240 - a few bytes


async def wait_until_gone(process: int) -> None:
    async with asyncio.timeout(20):
        while _lives(process):  # noqa: ASYNC110 - another process ends
            await asyncio.sleep(0.01)


def _lives(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
