"""Fails semantic.verifier_determinism (and runtime.seed_control, semantic.replayability): many rewards are random.

The rows have no prompt.
"""

from checks.bases.unprompted import *


@hookimpl
def verify(task: Word, transcript):
    return Verdict(reward=float(transcript.reply.strip() == task.word or random.random() < 0.5))
