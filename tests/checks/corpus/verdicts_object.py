"""Fails runtime.verdicts (and semantic.oracle_max, semantic.reward_range): a verdict contains a non-JSON value."""

from checks.bases.words import *
from pydantic import ConfigDict


class Graded(Verdict):
    model_config = ConfigDict(arbitrary_types_allowed=True)
    thing: Any = None


@hookimpl
def verify(task: Word, transcript):
    return Graded(reward=float(transcript.reply.strip() == task.word), thing=object())
