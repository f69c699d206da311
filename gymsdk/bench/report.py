"""The results of a benchmark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pydantic import BaseModel, ConfigDict

from gymsdk.bench.processes import MemoryMeasure

PERCENTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999}
"""The reported percentiles of the latency, by the names of their fields."""

STAGES = ("send", "queue", "reset", "model", "step", "verify", "close", "serialise", "server", "client")
"""The parts of a rollout's latency, in the order in which results list them; `LoadResult.stages` describes them."""


class Latency(BaseModel):
    """The time from a rollout's request to its response, in milliseconds.

    In an open loop, the time counts from the rollout's arrival, and not from the moment at which the load generator was
    able to send it.
    """

    model_config = ConfigDict(frozen=True)

    p50: float
    p90: float
    p99: float
    p999: float
    mean: float
    max: float


class Memory(BaseModel):
    """Megabytes of a process and its child processes before, halfway through and after a load, and the maximum.

    `BenchResult.memory_measure` says whether it is the PSS or the RSS.
    """

    model_config = ConfigDict(frozen=True)

    before: float
    half: float
    after: float
    most: float


class LoopLag(BaseModel):
    """How late the callbacks of a process's event loop ran during a load, in milliseconds.

    The percentiles are over time and are as precise as the buckets of the histogram, which are about 30 % apart.
    """

    model_config = ConfigDict(frozen=True)

    p50: float
    p99: float
    max: float


class Traffic(BaseModel):
    """Bytes of the bodies of requests that a server received and of responses that it sent, per rollout."""

    model_config = ConfigDict(frozen=True)

    received: float
    sent: float


class OpenLoop(BaseModel):
    """The arrivals of an open loop.

    Attributes:
        rate: The requested arrivals per second.
        offered: The number of rollouts per second that the load generator starts, without the first and the last tenth.
        achieved: The rollouts that were completed per second, without the first and the last tenth of the completions.
        keeps_up: Whether the servers achieve the offered rate; `None` if there are too few rollouts to tell.
        most: The highest number of outstanding rollouts.
        delayed: How many rollouts had to wait because the limit of outstanding rollouts was reached.
        late_p99: The 99th percentile of the milliseconds by which the load generator itself sent rollouts late.
    """

    model_config = ConfigDict(frozen=True)

    rate: float
    offered: float | None
    achieved: float | None
    keeps_up: bool | None
    most: int
    delayed: int
    late_p99: float


class CostFactors(BaseModel):
    """The cost of a rollout of a shape, relative to the shape `simple` under the same load.

    Attributes:
        cpu: The factor of the servers' CPU time per rollout.
        rate: The rate of `simple`, divided by the rate of the shape.
        reference: The factor in NeMo Gym's capacity table, or `None` if the table does not list the shape.
    """

    model_config = ConfigDict(frozen=True)

    cpu: float | None
    rate: float | None
    reference: float | None


class LoadResult(BaseModel):
    """The result of one load.

    Attributes:
        concurrency: The concurrent rollouts of a closed loop, or the most outstanding rollouts of an open loop.
        open_loop: The arrivals, or `None` for a closed loop.
        rate: Rollouts per second, from the first request to the last response.
        cpu: Milliseconds of CPU per rollout, by process.
        cpu_share: The share of one CPU core that each process used.
        loop_lag: The event-loop lag, by process.
        calls: Model calls per rollout.
        requests: HTTP requests per rollout, by server.
        traffic: Bytes per rollout, by server.
        stages: Mean milliseconds per rollout by stage; together they are the mean latency. `send` is the time that an
            arrival waited to be sent; `queue` the time until a server started the request and had a free slot for the
            episode; `reset`, `model`, `step`, `verify` and `close` are the stages of an episode; `serialise` is the
            time for writing the rollout as JSON; `server` is the rest of the time in the server; and `client` is the
            rest of the latency: HTTP and the load generator. Empty if the servers do not report these times.
        reward: The mean reward.
        expected: The mean reward of the recording, or `None` if it is unknown.
        wrong: How many rewards differ from the recording, or `None` if it is unknown.
        failures: How many rollouts had no reward, by kind.
        messages: The first message of each kind of failure.
        open: Sessions and episodes that were still open after the load.
        factors: The cost relative to the shape `simple`, for another shape.
    """

    model_config = ConfigDict(frozen=True)

    environment: str
    concurrency: int
    open_loop: OpenLoop | None = None
    rollouts: int
    seconds: float
    rate: float
    latency: Latency | None
    cpu: dict[str, float]
    cpu_share: dict[str, float] = {}
    memory: dict[str, Memory]
    loop_lag: dict[str, LoopLag] = {}
    calls: float
    requests: dict[str, float]
    traffic: dict[str, Traffic] = {}
    stages: dict[str, float] = {}
    reward: float | None
    expected: float | None
    wrong: int | None
    failures: dict[str, int]
    messages: dict[str, str]
    open: int
    factors: CostFactors | None = None

    @property
    def is_correct(self) -> bool:
        """Whether every rollout had a reward and no reward was wrong."""
        return not (self.failures or self.wrong) and self.rollouts > 0


class BenchResult(BaseModel):
    """The results of one environment's servers.

    Attributes:
        shape: The shape of the rollouts, if the environment is the benchmark's own.
        ready: Seconds until the servers were ready, or `None` if the benchmark did not start them.
        ready_cpu: Seconds of CPU until then.
        ready_memory: Megabytes of memory when ready.
        memory_measure: How all memory of this result is measured.
        loads: The result of each load.
    """

    model_config = ConfigDict(frozen=True)

    environment: str
    shape: str | None = None
    model: str
    ready: float | None
    ready_cpu: float | None
    ready_memory: float | None
    memory_measure: MemoryMeasure
    loads: tuple[LoadResult, ...]

    @property
    def title(self) -> str:
        """The name of the measured shape or environment."""
        return self.shape or self.environment


def compute_latency(seconds: Sequence[float]) -> Latency | None:
    """Return the percentiles, the mean and the maximum of *seconds* in milliseconds, or `None` if there are none."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    percentiles = {name: round(1e3 * compute_percentile(ordered, share), 3) for name, share in PERCENTILES.items()}
    mean, longest = (round(1e3 * value, 3) for value in (sum(ordered) / len(ordered), ordered[-1]))
    return Latency(**percentiles, mean=mean, max=longest)


def compute_percentile(ordered: Sequence[float], share: float) -> float:
    """Return the value that *share* of the values in *ordered* do not exceed; there must be at least one value."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def compute_mean(values: Sequence[float]) -> float | None:
    """Return the mean of *values*, or `None` if there are none."""
    return sum(values) / len(values) if values else None


def compute_stages(
    latency: float,
    episodes: Mapping[str, float],
    *,
    send: float,
    queue: float,
    admission: float,
    serialise: float,
    server: float,
) -> dict[str, float]:
    """Return the stages of a mean latency, all in milliseconds per rollout, in the order of `STAGES`.

    Args:
        latency: The mean latency.
        episodes: The stages of the episodes.
        send: The time that arrivals waited to be sent.
        queue: The time that episodes waited for a slot.
        admission: The time that requests waited until the server started them.
        serialise: The time for writing rollouts as JSON.
        server: The time from the start of a request to the end of its response, in the server.
    """
    known = {
        **episodes,
        "send": send,
        "queue": queue + admission,
        "serialise": serialise,
        "server": server - sum(episodes.values()) - queue - serialise,
        "client": latency - send - admission - server,
    }
    # The clocks of two processes are read at different moments, so a difference may be slightly negative.
    return {name: round(max(0.0, known[name]), 3) for name in STAGES if name in known and (name != "send" or send)}
