"""Fails nothing: a train split of 100,000 rows, and a test split without any of them."""

from checks.bases.remainders import *

TEST = range(20_000, 20_500)
