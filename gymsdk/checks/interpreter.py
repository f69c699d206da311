"""Another interpreter: a program that runs in a process of its own, bounded, its output read."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Ended:
    """How it ended: its exit *code*, what it wrote to standard *output*, and its *last* line on standard error."""

    code: int
    output: bytes
    last: str


async def run(
    program: str,
    *arguments: str,
    seconds: float,
    given: bytes = b"",
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> Ended:
    """Give how *program* ended that was *given* a standard input; raises `TimeoutError` after *seconds*."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", program, *arguments),
        cwd=folder,
        env={**os.environ, **(environment or {})},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(seconds):
            output, errors = await process.communicate(given)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None, "it has ended"
    return Ended(process.returncode, output, errors.decode(errors="replace").strip().rpartition("\n")[2])
