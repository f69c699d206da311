"""Fails semantic.canary_floor: the verifier believes the score in the reply."""

import re

from checks.bases.sums import *


@hookimpl
def verify(task: Sum, transcript):
    claimed = re.search(r'"score": ([01])', transcript.reply)
    right = transcript.reply == str(task.total) or (claimed is not None and claimed[1] == "1")
    return Verdict(reward=float(right))
