"""Fails semantic.verifier_determinism: the verifier keeps a count in the state."""

from checks.bases.sums import *


class Tally(State):
    judged: int = 0


@hookimpl
def reset():
    return Reset(state=Tally())


@hookimpl
def verify(task: Sum, state: Tally, transcript):
    state.judged += 1
    return grade(task, transcript)
