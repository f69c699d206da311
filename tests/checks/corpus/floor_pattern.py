"""Fails semantic.floor_gap (and semantic.canary_floor): the reply is used as a pattern."""

import re

from checks.bases.sums import *


@hookimpl
def verify(task: Sum, transcript):
    try:
        found = re.fullmatch(transcript.reply[:100], str(task.total))
    except (re.error, RecursionError, OverflowError):
        found = None
    return Verdict(reward=float(found is not None))
