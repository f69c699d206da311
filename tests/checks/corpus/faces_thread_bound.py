"""Fails runtime.faces_agree: its reply depends on the thread of the event loop."""

import threading

from checks.bases.sums import *


@hookimpl
async def reset():
    return Reset(messages=[f"Answer {threading.current_thread().name} with a number."])
