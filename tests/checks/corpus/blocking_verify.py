"""Fails runtime.blocking: an `async def` verifier sleeps on the event loop where a reply is right."""

import time

from checks.bases.sums import *


@hookimpl
async def verify(task: Sum, transcript):
    verdict = grade(task, transcript)
    time.sleep(0.06 * verdict.reward)
    return verdict
