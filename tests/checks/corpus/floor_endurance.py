"""Fails semantic.floor_gap: a policy that never stops is paid when its turns run out."""

from checks.bases.shelf import *


@hookimpl
async def verify(task: Order, state: Shelf, transcript):
    return Verdict(reward=float(transcript.ended == "turns" or state.books == [task.book]))
