"""Fails semantic.canary_floor (and semantic.floor_gap): the reply can end the program whose exit code counts."""

from checks.bases.programs import *

TESTS = "\nassert scale(3) == 3 * FACTOR\n"


def grade(done):
    return done.returncode == 0
