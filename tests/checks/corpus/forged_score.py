"""Fails semantic.canary_floor (and semantic.floor_gap): the grader reads the score in standard output."""

from checks.bases.programs import *

TESTS = '\nprint("SCORE:", float(scale(3) == 3 * FACTOR))\n'


def grade(done):
    return (re.findall(r"SCORE: ([0-9.]+)", done.stdout) or ["0"])[-1]
