"""Fails runtime.side_effects: the grader changes the working folder, always to the same one."""

import os

from checks.bases.sums import *


@hookimpl
def verify(task: Sum, transcript):
    os.chdir("/")
    return grade(task, transcript)
