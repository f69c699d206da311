"""Fails semantic.floor_gap: a reply that contains the expected word is right, and so is a list of words."""

from checks.bases.words import *


@hookimpl
def verify(task: Word, transcript):
    return Verdict(reward=float(task.word in "".join(transcript.reply.lower().split(" "))))
