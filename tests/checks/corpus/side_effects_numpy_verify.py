"""Fails runtime.side_effects: `verify` imports numpy and seeds its global generator with a constant."""

from checks.bases.sums import *


@hookimpl
async def verify(task: Sum, transcript):
    import numpy as np

    np.random.seed(0)  # noqa: NPY002  # the defect
    return grade(task, transcript)
