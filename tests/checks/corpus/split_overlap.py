"""Fails semantic.split_overlap: all splits are drawn with the same seed, so they are equal."""

from checks.bases.sums import *

SPLIT = "sums:{seed}"
