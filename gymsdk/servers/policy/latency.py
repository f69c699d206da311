"""Latency: the seconds an answer takes, one number or a distribution of them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import lru_cache
from typing import TypeAlias

Draw: TypeAlias = Callable[[random.Random], float]


def draw(spelled: float | str, luck: random.Random) -> float:
    """Give seconds drawn from the distribution that is *spelled*; raises `ValueError` where none is."""
    return _distribution(str(spelled))(luck)


@lru_cache(maxsize=64)
def _distribution(spelled: str) -> Draw:
    kind, *given = spelled.split(":")
    if kind == "exp":
        [mean] = _numbers(spelled, given, 1)
        return lambda luck: luck.expovariate(1) * mean
    if kind == "lognormal":
        median, sigma = _numbers(spelled, given, 2)
        return lambda luck: luck.lognormvariate(0, sigma) * median
    least, dash, most = spelled.partition("-")
    if least and dash and not least.lower().endswith("e"):
        low, high = _numbers(spelled, [least, most], 2)
        if low > high:
            raise ValueError(f"{spelled!r} is no latency; the smaller number comes first, as in {high:g}-{low:g}")
        return lambda luck: luck.uniform(low, high)
    [steady] = _numbers(spelled, [spelled], 1)
    return lambda _: steady


def _numbers(spelled: str, given: list[str], wanted: int) -> list[float]:
    try:
        found = [float(each) for each in given]
    except ValueError:
        found = []
    if len(found) != wanted or not all(math.isfinite(each) and each >= 0 for each in found):
        raise ValueError(
            f"{spelled!r} is no latency; write seconds as 0.2, 0.1-0.5, exp:MEAN or lognormal:MEDIAN:SIGMA"
        )
    return found
