"""Simulated faults of a policy's endpoint, drawn for each request with a seed."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import count, repeat
from typing import Annotated, Literal, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from gymsdk.settings import FAULTS, Flag

Distribution: TypeAlias = Callable[[random.Random], float]


def draw_latency(latency: float | str, rng: random.Random) -> float:
    """Draw seconds from the distribution *latency*, written as for `Faults`; raises `ValueError` if it is invalid."""
    return _parse_distribution(str(latency))(rng)


@lru_cache(maxsize=64)
def _parse_distribution(latency: str) -> Distribution:
    kind, *parameters = latency.split(":")
    if kind == "exp":
        [mean] = _parse_numbers(latency, parameters, 1)
        return lambda rng: rng.expovariate(1) * mean
    if kind == "lognormal":
        median, sigma = _parse_numbers(latency, parameters, 2)
        return lambda rng: rng.lognormvariate(0, sigma) * median
    least, dash, most = latency.partition("-")
    if least and dash and not least.lower().endswith("e"):
        low, high = _parse_numbers(latency, [least, most], 2)
        if low > high:
            raise ValueError(f"{latency!r} is no latency; the smaller number comes first, as in {high:g}-{low:g}")
        return lambda rng: rng.uniform(low, high)
    [seconds] = _parse_numbers(latency, [latency], 1)
    return lambda _: seconds


def _parse_numbers(latency: str, words: list[str], count: int) -> list[float]:
    try:
        seconds = [float(number) for number in words]
    except ValueError:
        seconds = []
    if len(seconds) != count or not all(math.isfinite(second) and second >= 0 for second in seconds):
        raise ValueError(
            f"{latency!r} is no latency; write seconds as 0.2, 0.1-0.5, exp:MEAN or lognormal:MEDIAN:SIGMA"
        )
    return seconds


Share: TypeAlias = Annotated[float, Field(ge=0, le=1)]
ShareFlag = Flag(FAULTS, "SHARE")
SERVER_ERROR_STATUSES = (500, 502, 503)
RATE_LIMITED_STATUS = 429


class Faults(BaseModel):
    """What goes wrong, and how often; *seed* determines which requests the faults hit."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    latency: Annotated[float | str, Flag(FAULTS, "SECONDS", takes=str, default="0")] = Field(
        0.0, description="Delay each response by 0.2, 0.1-0.5, exp:MEAN or lognormal:MEDIAN:SIGMA seconds."
    )
    errors: Annotated[Share, ShareFlag] = Field(0.0, description="Answer this share of requests with 500, 502 or 503.")
    limited: Annotated[Share, ShareFlag] = Field(0.0, description="Answer this share of requests with 429.")
    cuts: Annotated[Share, ShareFlag] = Field(
        0.0, description="Cut this share of connections before or during the response."
    )
    malformed: Annotated[Share, ShareFlag] = Field(
        0.0, description="Cut the arguments of the first tool call in this share of responses."
    )
    truncated: Annotated[Share, ShareFlag] = Field(0.0, description="End this share of streams too early.")
    context: Annotated[int | None, Flag(FAULTS, "N")] = Field(
        None, ge=2, description="Limit prompt and response to N tokens together."
    )
    unparsed: Annotated[bool, Flag(FAULTS)] = Field(
        False, description="Leave tool calls in the text, as an engine with the wrong tool parser does."
    )
    refuses_tools: Annotated[bool, Flag(FAULTS, names=("--refuse-tools",))] = Field(
        False, description="Reject tools, as an engine without a tool parser does."
    )
    seed: int = 0

    @field_validator("latency")
    @classmethod
    def _check_latency(cls, value: float | str) -> float | str:
        draw_latency(value, random.Random(0))
        return value

    @model_validator(mode="after")
    def _check_shares(self) -> Self:
        if self.errors + self.limited + self.cuts > 1:
            raise ValueError("the shares of errors, limited and cuts add up to more than 1")
        return self


NO_FAULT = Faults()


@dataclass(frozen=True, slots=True)
class RequestFault:
    """The fault of one request: an error *status* or a damaged answer, after *delay* seconds."""

    delay: float = 0.0
    status: int | None = None
    cut: Literal["before", "halfway"] | None = None
    malformed: bool = False
    truncated: bool = False


def draw_faults(faults: Faults) -> Iterator[RequestFault]:
    """Yield the faults of the requests in order; they depend only on the seed and on the request's number."""
    if faults.model_dump(exclude={"context", "unparsed", "refuses_tools", "seed"}, exclude_defaults=True):
        yield from (_draw_fault(faults, random.Random(f"{faults.seed}:{number}")) for number in count())
    yield from repeat(RequestFault())


def _draw_fault(faults: Faults, rng: random.Random) -> RequestFault:
    share, error_status, is_before_answer = rng.random(), rng.choice(SERVER_ERROR_STATUSES), rng.random() < 0.5  # noqa: PLR2004 - a coin
    # All numbers are drawn for each request, so that one share does not move the other faults.
    malformed, truncated = rng.random() < faults.malformed, rng.random() < faults.truncated
    delay = draw_latency(faults.latency, rng)
    failing = faults.errors + faults.limited
    if share < failing:
        return RequestFault(delay, status=error_status if share < faults.errors else RATE_LIMITED_STATUS)
    cut: Literal["before", "halfway"] = "before" if is_before_answer else "halfway"
    return RequestFault(
        delay, cut=cut if share < failing + faults.cuts else None, malformed=malformed, truncated=truncated
    )
