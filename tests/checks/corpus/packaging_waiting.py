"""Fails packaging.import: it sleeps when it is imported."""

import time

from checks.bases.sums import *

time.sleep(3.5)
