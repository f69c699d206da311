"""Fails nothing: there is one task."""

from checks.bases.words import *


@hookimpl
def tasks(split: Literal["test"]):
    yield Word.ask("Name the capital of Burkina Faso.", word="Ouagadougou")


@hookimpl
def verify(task: Word, transcript):
    return Verdict(reward=float(transcript.reply.strip().lower() == task.word.lower()))
