"""Fails semantic.variants: a claimed variant is compared literally."""

from checks.bases.sums import *


@hookimpl
def claims(task: Sum):
    return Claims(variants=[f"{task.total}.0"])
