"""Fails packaging.entry_point (and runtime.load): its name ends like a Gymnasium version."""

from checks.bases.sums import *
