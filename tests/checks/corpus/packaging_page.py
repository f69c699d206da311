"""Fails packaging.page: it has no README and no licence."""

from checks.bases.sums import *
