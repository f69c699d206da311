"""Maths problems with exact answers, graded by math-verify."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager

from gymsdk import Claims, Message, Rollout, Transcript, hookimpl

from .answers import bare, boxed
from .figures import figures
from .problems import Split, drawn
from .rows import MathTask, chance, task_of
from .settings import MathConfig
from .shortcut import Kept
from .verdict import MathVerdict, decided


@hookimpl
@asynccontextmanager
async def lifespan() -> AsyncIterator[Kept]:
    """Keep settled grades for as long as the environment runs."""
    yield Kept()


@hookimpl
async def verify(task: MathTask, transcript: Transcript, config: MathConfig, shared: Kept) -> MathVerdict:
    """Compare the answer in what the policy wrote with the expected one."""
    return await decided(task, transcript.text(), config, shared)


@hookimpl
def tasks(split: Split, seed: int, config: MathConfig) -> Iterator[MathTask]:
    """Draw problems of the chosen families and difficulties."""
    return map(task_of, drawn(split, seed, config.families, config.difficulties))


@hookimpl
def solve(task: MathTask) -> Message:
    """Reply with the expected answer in a box."""
    return Message(content=boxed(bare(task.expected_answer)))


@hookimpl
def claims(task: MathTask) -> Claims:
    """Claim full marks for the expected answer and its other forms, next to none for a guess."""
    return Claims(chance=chance(task), variants=[boxed(answer) for answer in task.other_answers])


@hookimpl
def metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Give the mean reward by family and by difficulty, and what math-verify and the judge gave."""
    return figures(rollouts)
