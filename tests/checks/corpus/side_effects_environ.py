"""Fails runtime.side_effects: the grader sets an environment variable, always to the same value."""

import os

from checks.bases.sums import *


@hookimpl
def verify(task: Sum, transcript):
    os.environ["GRADED"] = "1"
    return grade(task, transcript)
