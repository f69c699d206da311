"""Fails nothing: additions with a correct verifier."""

from checks.bases.sums import *
