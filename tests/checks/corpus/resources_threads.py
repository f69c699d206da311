"""Fails runtime.resources: every episode starts a thread that never ends."""

import threading

from checks.bases.sums import *


@hookimpl
async def reset():
    threading.Thread(target=threading.Event().wait, args=(30,), name="waiter", daemon=True).start()
    return Reset()
