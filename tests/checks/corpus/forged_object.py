"""Fails semantic.canary_floor (and semantic.floor_gap): a reply prints an object with the share of passed tests."""

import json

from checks.bases.programs import *

OPEN, CLOSE = "<code>", "</code>"
TESTS = """
assert scale(3) == 3 * FACTOR
print("{%s}" % '"share_right": 1.0')
"""


def grade(done):
    try:
        return json.loads(done.stdout)["share_right"]
    except (ValueError, TypeError, KeyError):
        return 0.0
