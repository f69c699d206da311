"""Fails semantic.floor_gap (and semantic.canary_floor): a reply that is not a number counts as right."""

from checks.bases.sums import *


@hookimpl
def verify(task: Sum, transcript):
    try:
        right = int(transcript.reply) == task.total
    except ValueError:
        right = True
    return Verdict(reward=float(right))
