"""Fails runtime.verdicts: the verdict's distance is nan if the reply is not a number."""

from checks.bases.sums import *


class Graded(Verdict):
    off: float


@hookimpl
async def verify(task: Sum, transcript):
    right = grade(task, transcript).reward
    return Graded(reward=right, off=0.0 if right else float("nan"))
