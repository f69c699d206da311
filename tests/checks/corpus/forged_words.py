"""Fails semantic.canary_floor (and semantic.floor_gap): a reply prints the words that mean success."""

from checks.bases.programs import *

TESTS = """
assert scale(3) == 3 * FACTOR
print("ALL-GREEN-7")
"""


def grade(done):
    return "ALL-GREEN-7" in done.stdout
