"""Fails nothing: replies run in a sandbox, and the verdict has a random word that they do not know."""

import secrets

from checks.bases.programs import *

TESTS = """
assert scale(3) == 3 * FACTOR
print("WORD")
"""


@hookimpl
def verify(task: Function, transcript):
    word = secrets.token_hex(16)
    return Verdict(reward=float(word in run(task, transcript, TESTS.replace("WORD", word)).stdout))
