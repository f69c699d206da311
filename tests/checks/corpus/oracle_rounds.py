"""Fails semantic.oracle_max: `solve` and `verify` write the answer in different notations."""

from checks.bases.sums import *


@hookimpl
def solve(task: Sum):
    return Message(content=f"{task.total:,}")
