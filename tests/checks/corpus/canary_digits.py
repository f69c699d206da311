"""Fails semantic.canary_floor: a number of thousands of digits breaks the verifier."""

from checks.bases.sums import *


@hookimpl
def verify(task: Sum, transcript):
    reply = transcript.reply.strip()
    return Verdict(reward=float(reply.isdigit() and int(reply) == task.total))
