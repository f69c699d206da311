"""Elsewhere: another interpreter, with another hash seed, that is asked for the rows of an installed environment."""

from __future__ import annotations

import asyncio
import os
import sys

import orjson

from gymsdk.checks.check import NotApplicable
from gymsdk.checks.subject import Subject
from gymsdk.errors import BrokenEnvironment
from gymsdk.types import Row

SECONDS = 45.0
"""Seconds the other interpreter may take."""

PROGRAM = """
import sys
from itertools import islice
import orjson
from pydantic_core import to_jsonable_python
from gymsdk.plugins.registry import load

asked = orjson.loads(sys.stdin.buffer.read())
environment = load(asked["name"], **asked["settings"])
rows = [task.row() for task in islice(environment.tasks(asked["split"], seed=asked["seed"]), asked["count"])]
sys.stdout.buffer.write(b"\\n" + orjson.dumps(to_jsonable_python(rows)))
"""


async def rows(subject: Subject, split: str, *, seed: int, count: int, hash_seed: int = 1) -> list[Row]:
    """Give the first *count* rows of *split* as a new interpreter draws them.

    Raises `NotApplicable` where *subject* is not installed or its settings are no JSON, `BrokenEnvironment` where it
    breaks there.
    """
    output = await _answer(_question(subject, split, seed, count), hash_seed)
    # What the environment itself prints comes before the last line.
    found: list[Row] = orjson.loads(output.rpartition(b"\n")[2])
    return found


def _question(subject: Subject, split: str, seed: int, count: int) -> bytes:
    if subject.entry is None:
        raise NotApplicable("the environment is not installed, so no other process can load it")
    asked = {"name": subject.name, "settings": dict(subject.settings), "split": split, "seed": seed, "count": count}
    try:
        return orjson.dumps(asked)
    except TypeError:
        raise NotApplicable("its settings are no JSON, so they cannot be handed to another process") from None


async def _answer(question: bytes, hash_seed: int) -> bytes:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PROGRAM),
        env={**os.environ, "PYTHONHASHSEED": str(hash_seed)},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(SECONDS):
            output, errors = await process.communicate(question)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        said = errors.decode(errors="replace").strip().rpartition("\n")[2]
        raise BrokenEnvironment(f"in a new process its rows cannot be drawn: {said}")
    return output
