"""Fails semantic.floor_gap: any prefix of the answer is right."""

from checks.bases.words import *


@hookimpl
def verify(task: Word, transcript):
    said = transcript.reply.strip()
    return Verdict(reward=float(bool(said) and task.word.startswith(said)))
