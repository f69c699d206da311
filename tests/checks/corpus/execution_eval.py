"""Fails semantic.code_execution: `verify` computes the reply."""

from checks.bases.sums import *

PROMPT = "Compute {one} plus {other}."


@hookimpl
def verify(task: Sum, transcript):
    try:
        value = eval(transcript.reply.strip()[:200], {})
    except Exception:  # noqa: BLE001  # so such a verifier goes on
        value = None
    return Verdict(reward=float(type(value) is int and value == task.total))
