"""Luck: how much of what an attack earned the claimed chance explains."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev

from gymsdk.checks.attack import Attempt
from gymsdk.checks.check import Finding
from gymsdk.checks.tasks import named

SURPRISE = 1e-3
"""The probability below which luck does not explain a mean any more."""

STEADY = 6
"""How many rewards have to be alike to tell that they are no luck."""

ERRORS = 4.0
"""How many standard errors above the chance they have to lie."""

GRAIN = 1e-6
"""A difference of rewards that is none."""


def beyond(attempts: Sequence[Attempt]) -> list[Finding]:
    """Give what one attack earned beyond the claimed chance, nothing where luck may explain it.

    Three rules. A task that claims a chance of 0 pays nothing to a policy that understands nothing. Over the others
    the mean of the rewards may lie above the mean of the claimed chances by what luck explains: rewards are taken as
    shares of the claimed maximum, and Hoeffding's bound for a mean of independent shares must stay above `SURPRISE`
    (with a chance of 0.02 on 12 tasks: three hits pass, four do not). That bound is for rewards that are all or
    nothing; crumbs that hardly vary are found by their own spread: `STEADY` tasks or more, `ERRORS` standard errors.
    """
    scored = [attempt for attempt in attempts if attempt.rollout.outcome == "scored"]
    barred = [attempt for attempt in scored if attempt.seen.claims.chance <= 0]
    paid = [attempt for attempt in barred if attempt.earned > GRAIN]
    others = [attempt for attempt in scored if attempt.seen.claims.chance > 0]
    if paid:
        return [_finding(barred, max(paid, key=_gain))]
    return [_finding(others, max(others, key=_gain))] if _surprising(others) else []


def _surprising(attempts: Sequence[Attempt]) -> bool:
    if not attempts:
        return False
    lowest = min(0.0, *(attempt.earned for attempt in attempts))
    shares = fmean(_share(attempt.earned, attempt, lowest) for attempt in attempts)
    chance = fmean(_share(attempt.seen.claims.chance, attempt, lowest) for attempt in attempts)
    if shares <= chance + GRAIN:
        return False
    return bound(shares, chance, len(attempts)) < SURPRISE or _steady(attempts)


def _steady(attempts: Sequence[Attempt]) -> bool:
    gains = [_gain(attempt) for attempt in attempts]
    crumbs = any(GRAIN < attempt.earned < attempt.seen.claims.maximum - GRAIN for attempt in attempts)
    if len(gains) < STEADY or not crumbs:
        return False
    return fmean(gains) > ERRORS * stdev(gains) / math.sqrt(len(gains)) + GRAIN


def _share(reward: float, attempt: Attempt, lowest: float) -> float:
    best = attempt.seen.claims.maximum - lowest
    return min(1.0, max(0.0, (reward - lowest) / best)) if best > 0 else 1.0


def bound(mean: float, chance: float, count: int) -> float:
    """Give Hoeffding's bound of the probability that *count* independent shares whose mean is *chance* reach *mean*."""
    if chance >= 1 or mean <= chance:
        return 1.0
    if chance <= 0:
        return 0.0
    upper = mean * math.log(mean / chance)
    lower = (1 - mean) * math.log((1 - mean) / (1 - chance)) if mean < 1 else 0.0
    return math.exp(-count * (upper + lower))


def _gain(attempt: Attempt) -> float:
    return attempt.earned - attempt.seen.claims.chance


def _finding(attempts: Sequence[Attempt], worst: Attempt) -> Finding:
    claims, count = worst.seen.claims, len(attempts)
    mean, chance = fmean(each.earned for each in attempts), fmean(each.seen.claims.chance for each in attempts)
    tasks = "the one task tried" if count == 1 else f"{count} tasks"
    return Finding(
        seen=f"a policy that {worst.attack.name} earns {mean:.3g} on average over {tasks}, where the claimed chance is"
        f" {chance:.3g}; here it said {worst.words} and got {worst.earned:g} of {claims.maximum:g}",
        task=named(worst.seen.task),
        mend=worst.attack.mend,
    )
