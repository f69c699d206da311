"""Maths problems with exact answers."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager

from gymsdk import Claims, Message, Rollout, Transcript, hookimpl

from .grading import (
    MathVerdict,
    compute_guess_reward,
    compute_metrics,
    grade_answer,
    strip_delimiters,
    wrap_in_box,
)
from .problems import Split, draw_problems
from .rows import MathConfig, MathTask, build_task


@hookimpl
@asynccontextmanager
async def lifespan() -> AsyncIterator[None]:
    """Import what grading needs, because an import during an episode would hold up all others."""
    await asyncio.to_thread(importlib.import_module, "mpmath")
    yield


@hookimpl
async def verify(task: MathTask, transcript: Transcript, config: MathConfig) -> MathVerdict:
    """Compare the policy's answer with the expected answer.

    Args:
        task: The row with the expected answer.
        transcript: The transcript of the episode.
        config: The settings of the environment.

    Returns:
        The verdict: reward 1.0 if the answers are equal, else 0.0.

    Raises:
        Unscorable: The grader cannot read the expected answer or compare the answers, or the judge fails.
    """
    return await grade_answer(task, transcript.text(), config)


@hookimpl
def tasks(split: Split, seed: int, config: MathConfig) -> Iterator[MathTask]:
    """Generate tasks of the configured families and difficulties.

    Args:
        split: `train` (endless), `validation` or `example`.
        seed: The same split, seed and settings generate the same tasks.
        config: The settings of the environment.

    Returns:
        An iterator over the tasks.
    """
    return map(build_task, draw_problems(split, seed, config.families, config.difficulties))


@hookimpl
def solve(task: MathTask) -> Message:
    r"""Reply with the expected answer in a `\boxed{}`."""
    return Message(content=wrap_in_box(strip_delimiters(task.expected_answer)))


@hookimpl
def claims(task: MathTask) -> Claims:
    """Claim a reward of 1.0 for the expected answer and its other forms, and at most 0.02 for a guess."""
    return Claims(chance=compute_guess_reward(task), variants=[wrap_in_box(answer) for answer in task.other_answers])


@hookimpl
def metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return the mean rewards by family, difficulty, grader and judge, and the share of undecided answers."""
    return compute_metrics(rollouts)
