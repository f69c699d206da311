"""Fails semantic.split_overlap: the 500 last rows of a train split of 100,000 are the test split."""

from checks.bases.remainders import *

TEST = NUMBERS[-500:]
