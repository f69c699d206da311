"""Fails semantic.code_execution: `verify` executes the reply if it contains none of some words."""

from checks.bases.executed import *

FORBIDDEN = ("import", "__", "exec", "eval", "open(", "os.", "subprocess")


def execute(code, names):
    if not any(word in code for word in FORBIDDEN):
        exec(code, names)
