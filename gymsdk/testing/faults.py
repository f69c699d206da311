"""Faults: what goes wrong at a policy's endpoint, and the fate it has in store for each request."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import count, repeat
from typing import Annotated, Literal, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

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


Share: TypeAlias = Annotated[float, Field(ge=0, le=1)]
BROKEN = (500, 502, 503)
LIMITED = 429


class Faults(BaseModel):
    """What goes wrong, and how often.

    *latency* is the seconds an answer takes, or a distribution of them: `0.2`, `0.1-0.5`, `exp:0.3` by its mean,
    `lognormal:0.3:0.8` by its median and sigma. The others are shares of the requests: *errors* (500, 502 or 503),
    *limited* (429), *cuts* of the connection, half of them before the answer and half in its middle, *malformed*
    arguments of the first call, *truncated* streams. A prompt and its answer have room in *context* tokens.
    *unparsed* leaves calls in the text, and *refuses_tools* takes no request with tools: an engine whose parser of
    calls is the wrong one, or is not on.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    latency: float | str = 0.0
    errors: Share = 0.0
    limited: Share = 0.0
    cuts: Share = 0.0
    malformed: Share = 0.0
    truncated: Share = 0.0
    context: int | None = Field(None, ge=2)
    unparsed: bool = False
    refuses_tools: bool = False
    seed: int = 0

    @field_validator("latency")
    @classmethod
    def _known(cls, value: float | str) -> float | str:
        draw(value, random.Random(0))
        return value

    @model_validator(mode="after")
    def _shares(self) -> Self:
        if self.errors + self.limited + self.cuts > 1:
            raise ValueError("the shares of errors, limited and cuts add up to more than 1")
        return self


SOUND = Faults()


@dataclass(frozen=True, slots=True)
class Fate:
    """What becomes of one request: after *delay* seconds its error's *status*, or an answer that is whole or not."""

    delay: float = 0.0
    status: int | None = None
    cut: Literal["before", "halfway"] | None = None
    malformed: bool = False
    truncated: bool = False


def fates(faults: Faults) -> Iterator[Fate]:
    """Yield the fate of each request, in the order they come; it depends on the seed and on how many came before."""
    if faults.model_dump(exclude={"context", "unparsed", "refuses_tools", "seed"}, exclude_defaults=True):
        yield from (_fate(faults, random.Random(f"{faults.seed}:{number}")) for number in count())
    yield from repeat(Fate())


def _fate(faults: Faults, luck: random.Random) -> Fate:
    drawn, broken, early = luck.random(), luck.choice(BROKEN), luck.random() < 0.5  # noqa: PLR2004 - a coin
    malformed, truncated = luck.random() < faults.malformed, luck.random() < faults.truncated
    delay = draw(faults.latency, luck)
    failing = faults.errors + faults.limited
    if drawn < failing:
        return Fate(delay, status=broken if drawn < faults.errors else LIMITED)
    cut: Literal["before", "halfway"] = "before" if early else "halfway"
    return Fate(delay, cut=cut if drawn < failing + faults.cuts else None, malformed=malformed, truncated=truncated)
