"""Additions with replies in Python code, which a case executes."""

from checks.bases.sums import *

PROMPT = "Write Python code that stores the sum of {one} and {other} in `answer`."
REPLY = "answer = {total}"


@hookimpl
def verify(task: Sum, transcript):
    names = {}
    try:
        execute(transcript.reply, names)
    except Exception:  # noqa: BLE001  # so such a verifier goes on
        return Verdict(reward=0.0)
    return Verdict(reward=float(names.get("answer") == task.total))
