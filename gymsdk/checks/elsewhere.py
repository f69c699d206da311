"""Elsewhere: another interpreter, with another hash seed, that draws an installed environment's rows and opens them."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from gymsdk import values
from gymsdk.checks import interpreter
from gymsdk.checks.check import NotApplicable
from gymsdk.checks.plain import Plain, plain
from gymsdk.checks.subject import Subject
from gymsdk.environment import Environment
from gymsdk.errors import BrokenEnvironment, EpisodeError
from gymsdk.sitting import Sitting
from gymsdk.transcript import Item
from gymsdk.types import Row, Task

SECONDS = 45.0
"""Seconds the other interpreter may take."""

PROGRAM = """
import asyncio, sys
from gymsdk.checks.elsewhere import drawn
from gymsdk.values import parsed

asked = parsed(sys.stdin.buffer.read())
told = asyncio.run(drawn(**asked)).model_dump_json()
sys.stdout.buffer.write(b"\\n" + told.encode())
"""


class Drawn(BaseModel):
    """The first *rows* of a split, and how the first of them open."""

    model_config = ConfigDict(frozen=True)

    rows: list[Row]
    openings: list[list[Item]] = []


async def drawn(*, name: str, settings: dict[str, object], split: str, seed: int, count: int, opened: int) -> Drawn:
    """Give what is drawn in this interpreter: *count* rows of *split*, the first *opened* of them opened."""
    from gymsdk.plugins.registry import load

    found = Subject(name, lambda: load(name, **settings), seed=seed, count=count, split=split)
    async with found.enter_environment() as environment:
        openings = [await opening(environment, task, seed) for task in found.tasks[:opened]]
    return Drawn.model_validate({"rows": [plain(task.row()) for task in found.tasks], "openings": openings})


async def opening(environment: Environment, task: Task, seed: int) -> Plain:
    """Give what an episode of *task* opens with, or how that fails, as plain JSON."""
    sitting = Sitting(environment)
    try:
        return plain((await sitting.open(task, seed=seed)).transcript.opening)
    except EpisodeError as error:
        return [{"failure": error.kind}]
    finally:
        await sitting.close()


async def asked(subject: Subject, split: str, *, seed: int, count: int, opened: int = 0, hash_seed: int = 1) -> Drawn:
    """Give what a new interpreter draws of *split*.

    Raises `NotApplicable` where *subject* is not installed or its settings are no JSON, `BrokenEnvironment` where it
    breaks there.
    """
    question = _question(subject, split=split, seed=seed, count=count, opened=opened)
    hashed = {"PYTHONHASHSEED": str(hash_seed)}
    ended = await interpreter.run(PROGRAM, seconds=SECONDS, given=question, environment=hashed)
    if ended.code:
        raise BrokenEnvironment(f"in a new process its rows cannot be drawn: {ended.last}")
    # What the environment itself prints comes before the last line.
    return Drawn.model_validate_json(ended.output.rpartition(b"\n")[2])


def _question(subject: Subject, **asked: str | int) -> bytes:
    if subject.entry is None:
        raise NotApplicable("the environment is not installed, so no other process can load it")
    try:
        return values.written({"name": subject.name, "settings": dict(subject.settings), **asked})
    except (TypeError, ValueError):
        raise NotApplicable("its settings are no JSON, so they cannot be handed to another process") from None
