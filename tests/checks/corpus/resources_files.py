"""Fails runtime.resources: every episode writes a temporary file and does not remove it."""

import os
import tempfile

from checks.bases.sums import *


@hookimpl
async def reset():
    handle, _ = tempfile.mkstemp(prefix="episode-")
    os.close(handle)
    return Reset()
