"""Fails runtime.seed_control (and runtime.episode_isolation, runtime.faces_agree): `reset` counts the episodes of the
process, and opens with the count.
"""

from itertools import count

from checks.bases.sums import *

COUNT = count()


@hookimpl
async def reset():
    return Reset(messages=[f"This is exercise {next(COUNT)}."])
