"""Fails semantic.code_execution: `verify` executes the reply without built-in functions, which code can find anyway."""

from checks.bases.executed import *


def execute(code, names):
    names["__builtins__"] = {}
    exec(code, names)
