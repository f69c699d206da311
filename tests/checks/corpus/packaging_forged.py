"""Fails packaging.import: at exit, the package prints a report of an import that costs nothing."""

import atexit
import threading

from checks.bases.sums import *

threading.Thread(target=threading.Event().wait, daemon=True, name="poller").start()
atexit.register(print, '\n{"cpu": 0.0, "wall": 0.0, "modules": [], "threads": []}')
