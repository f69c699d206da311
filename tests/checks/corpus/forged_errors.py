"""Fails semantic.canary_floor (and semantic.floor_gap): a reply prints the words that mean success as errors."""

from checks.bases.programs import *

TESTS = """
assert scale(3) == 3 * FACTOR
print("QUITE-FINE", file=sys.stderr)
"""


def grade(done):
    return done.stderr.strip().endswith("QUITE-FINE")
