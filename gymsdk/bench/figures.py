"""Figures: what a bench has found, as data."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict


class Latency(BaseModel):
    """Milliseconds from a rollout's request to its answer: half of them took at most *p50*, and so on."""

    model_config = ConfigDict(frozen=True)

    p50: float
    p90: float
    p99: float


class Memory(BaseModel):
    """Megabytes that a process and its workers had before a load, halfway, after it, and at most meanwhile."""

    model_config = ConfigDict(frozen=True)

    before: float
    half: float
    after: float
    most: float


class Load(BaseModel):
    """What came of one load: *rollouts* of one environment, *at_once* of them in flight.

    *cpu* is milliseconds a rollout by process, *requests* are HTTP requests a rollout by server, *calls* those of the
    model. *wrong* counts rewards that differ from the recording's, *expected* is its mean; both are missing where
    nobody knows them. *open* is what sessions and episodes were left when nobody was at anything.
    """

    model_config = ConfigDict(frozen=True)

    environment: str
    at_once: int
    rollouts: int
    seconds: float
    rate: float
    latency: Latency | None
    cpu: dict[str, float]
    memory: dict[str, Memory]
    calls: float
    requests: dict[str, float]
    reward: float | None
    expected: float | None
    wrong: int | None
    failures: dict[str, int]
    messages: dict[str, str]
    open: int

    @property
    def is_correct(self) -> bool:
        """Whether every rollout had its reward, none of them wrong."""
        return not (self.failures or self.wrong) and self.rollouts > 0


class Served(BaseModel):
    """What was found of the servers of one environment: their start, where they are the bench's own, and the loads.

    Seconds until ready, seconds of CPU until then, megabytes when ready.
    """

    model_config = ConfigDict(frozen=True)

    environment: str
    model: str
    ready: float | None
    ready_cpu: float | None
    ready_memory: float | None
    loads: tuple[Load, ...]


def latency(seconds: Sequence[float]) -> Latency | None:
    """Give the percentiles of some *seconds*, in milliseconds; `None` where there are none."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    p50, p90, p99 = (
        round(1e3 * ordered[min(len(ordered) - 1, int(each * len(ordered)))], 3) for each in (0.5, 0.9, 0.99)
    )
    return Latency(p50=p50, p90=p90, p99=p99)


def mean(values: Sequence[float]) -> float | None:
    """Give the mean of some *values*, `None` where there are none."""
    return sum(values) / len(values) if values else None
