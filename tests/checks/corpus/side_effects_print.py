"""Fails runtime.side_effects: `verify` prints the values that it compares."""

from checks.bases.sums import *


@hookimpl
async def verify(task: Sum, transcript):
    print("expected", task.total)
    return grade(task, transcript)
