"""Fails semantic.canary_floor: the comparison accepts nan."""

from checks.bases.sums import *


@hookimpl
def verify(task: Sum, transcript):
    try:
        wrong = abs(float(transcript.reply) - task.total) > 0.01
    except ValueError:
        wrong = True
    return Verdict(reward=float(not wrong))
