"""Fails semantic.canary_floor: the verifier assumes that the transcript has a reply."""

from checks.bases.sums import *


@hookimpl
def verify(task: Sum, transcript):
    last = transcript.items[-1]
    text = last["content"][0]["text"] if last.get("content") else ""
    return Verdict(reward=float(text == str(task.total)))
