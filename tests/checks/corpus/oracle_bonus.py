"""Fails semantic.reward_range (and semantic.oracle_max): short replies earn a bonus above the claimed maximum."""

from checks.bases.sums import *


@hookimpl
def verify(task: Sum, transcript):
    right = grade(task, transcript).reward
    return Verdict(reward=right * 1.1, components={"right": right, "short": right * 0.1})
