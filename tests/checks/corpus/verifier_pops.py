"""Fails semantic.verifier_determinism: the verifier empties the transcript as it reads it."""

from checks.bases.sums import *


@hookimpl
def verify(task: Sum, transcript):
    verdict = grade(task, transcript)
    transcript.items.clear()
    return verdict
