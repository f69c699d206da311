"""Fails semantic.floor_gap: a reply of the right length earns a small reward that is not claimed."""

from checks.bases.sums import *


@hookimpl
def verify(task: Sum, transcript):
    reply = transcript.reply.strip()
    return Verdict(reward=1.0 if reply == str(task.total) else 0.2 * bool(reply))


@hookimpl
def claims():
    return Claims(chance=0.1)
