"""Fails runtime.side_effects: `verify` writes to descriptor 1."""

import os

from checks.bases.sums import *


@hookimpl
async def verify(task: Sum, transcript):
    os.write(1, b"reward: 1.0\n")
    return grade(task, transcript)
