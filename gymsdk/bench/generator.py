"""Send one load to running servers, in a closed or an open loop, and measure the servers meanwhile."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, count, cycle, islice
from uuid import uuid4

from gymsdk import jsonl
from gymsdk.bench.arrivals import ArrivalLog, draw_arrivals, send_at_arrivals
from gymsdk.bench.readings import LagReading, MetricsDifference, read_metrics, summarise_lag
from gymsdk.bench.recording import Recording
from gymsdk.bench.report import LoadResult, LoopLag, compute_latency, compute_mean, compute_stages
from gymsdk.bench.stage import LOAD, Stage
from gymsdk.bench.usage import Memories, measure_cpu, name_children, sample_memory, summarise_memory
from gymsdk.client import read_answer
from gymsdk.line import ROLLOUT_INDEX, TASK_INDEX, get_agent_name
from gymsdk.observability.loop_lag import LoopLagSampler
from gymsdk.request_options import RequestOptions
from gymsdk.rollouts.agent_client import AgentClient
from gymsdk.rollouts.jobs import Job, PlayedJob, catch_errors, play_with_retries
from gymsdk.rollouts.remote import parse_response_row, parse_rollout
from gymsdk.types import Budget, Rollout, Row, Timing

CLIENTS_PER_PASS = 32
"""How many clients of a closed loop start in one pass of the event loop."""

REWARD_TOLERANCE = 1e-9
"""The difference up to which two rewards count as equal."""


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """One load.

    Attributes:
        concurrency: The concurrent rollouts of a closed loop, or the most outstanding rollouts of an open loop.
        rollouts: The number of rollouts to send.
        seconds: The time in which to send them, instead of *rollouts*.
        attempts: How often a failed rollout is tried.
        rate: The arrivals per second of an open loop, or `None` for a closed loop.
        seed: The seed of the arrivals.
    """

    concurrency: int
    rollouts: int | None = None
    seconds: float | None = None
    attempts: int = 1
    rate: float | None = None
    seed: int = 0


@dataclass(slots=True)
class Tally:
    """The counts of the rollouts so far."""

    expected: Mapping[int, float] | None
    took: array[float] = field(default_factory=lambda: array("d"))
    rewards: array[float] = field(default_factory=lambda: array("d"))
    right: array[float] = field(default_factory=lambda: array("d"))
    wrong: int = 0
    calls: int = 0
    stages: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    failures: Counter[str] = field(default_factory=Counter)
    messages: dict[str, str] = field(default_factory=dict)

    def add(self, result: PlayedJob) -> None:
        """Count one rollout."""
        rollout = result.rollout
        self.calls += rollout.turns
        if rollout.failure is not None or rollout.reward is None:
            kind = rollout.failure.kind if rollout.failure else "no_reward"
            self.failures[kind] += 1
            self.messages.setdefault(kind, rollout.failure.message if rollout.failure else "")
            return
        for stage, milliseconds in rollout.timing.stages.items():
            self.stages[stage] += milliseconds
        self.rewards.append(rollout.reward)
        if self.expected is not None:
            right = self.expected[result.job.task]
            self.right.append(right)
            self.wrong += abs(rollout.reward - right) > REWARD_TOLERANCE

    @property
    def rollouts(self) -> int:
        """How many rollouts ended, including failures."""
        return len(self.rewards) + self.failures.total()


class RowSender:
    """Sends rows to agents, and reads only the counted parts of each response.

    The load generator shares the machine with the servers, so each row is written as JSON only once. Every rollout has
    a new ID, because a server answers a known ID with its earlier response.

    Args:
        agents: Sends the rows.
        recording: The jobs.
        attempts: How often a failed rollout is tried.
    """

    def __init__(self, agents: AgentClient, recording: Recording, attempts: int) -> None:
        self._agents = agents
        self._attempts = attempts
        # Before the load: while it runs, the CPU time of this process lowers the rate that it can send.
        self._bodies = {job.task: _encode_job(job) for job in recording.jobs}
        # Servers answer an id that they have seen, such as that of an earlier benchmark, without playing it again.
        self._run = uuid4().hex[:12]
        self._numbers = count()

    async def send(self, job: Job) -> PlayedJob:
        """Send *job* until it is scored or has no attempts left."""
        number = next(self._numbers)

        async def send_once(job: Job, attempt: int) -> Rollout:
            rollout_id = f"bench.{self._run}.{number}.{job.task}.{job.repeat}.{attempt}"
            return await catch_errors(job, 0, self._send_once(job, rollout_id))

        return await play_with_retries(job, send_once, attempts=self._attempts)

    async def _send_once(self, job: Job, id: str) -> Rollout:
        began = time.perf_counter()
        body = self._bodies[job.task] + b',"_ng_rollout_id":"' + id.encode() + b'"}'
        answer = parse_response_row(await self._agents.run(get_agent_name(job.row) or "", body), "host")
        milliseconds = (time.perf_counter() - began) * 1e3
        return _read_scored(answer, job) or parse_rollout(answer, job, 0, milliseconds=milliseconds)


def _encode_job(job: Job) -> bytes:
    """Return the JSON of a job's row without its last brace, after which the ID follows."""
    options = RequestOptions(job.compute_seed(0), job.repeat, budget=Budget().model_dump())
    row = {**job.row, TASK_INDEX: job.task, ROLLOUT_INDEX: job.repeat, **options.to_field()}
    return jsonl.dump_portable_json(row)[:-1]


def _read_scored(answer: Row, job: Job) -> Rollout | None:
    """Return the reward, the turns and the timing of a rollout that gymsdk scored, without validating the rest."""
    stored = read_answer(answer)
    if not stored.is_verified or stored.find_no_reward(job.row) is not None:
        return None
    # Without validation, whose CPU time would count as that of the client.
    timing = Timing.model_construct(stages=stored.stages)
    return Rollout.model_construct(
        id=job.id,
        environment=job.environment,
        row=job.row,
        seed=0,
        outcome="scored",
        reward=float(answer["reward"]),
        turns=stored.turns,
        timing=timing,
    )


@dataclass(frozen=True, slots=True)
class _Measurements:
    """The measurements of one load.

    Attributes:
        seconds: The seconds from the first request to the last response.
        cpu: The seconds of CPU that each process used.
        memories: The samples of memory by process.
        metrics: What the load added to the counters of the servers.
        generator_lag: The event-loop lag of this process; `None` if the load was shorter than the interval.
        arrivals: The arrivals of an open loop.
    """

    seconds: float
    cpu: Mapping[str, float]
    memories: Memories
    metrics: MetricsDifference
    generator_lag: LoopLag | None
    arrivals: ArrivalLog | None


async def run_load(stage: Stage, recording: Recording, plan: LoadPlan) -> LoadResult:
    """Send the jobs of *recording* to the servers of *stage* and return the result."""
    expected: dict[int, float] | None = None
    if recording.rewards is not None:
        expected = {job.task: reward for job, reward in zip(recording.jobs, recording.rewards, strict=True)}
    tally = Tally(expected)
    headers_for = stage.served.client.build_headers_for
    sender = RowSender(
        AgentClient(stage.served.client, once=stage.served.is_idempotent), recording, attempts=plan.attempts
    )
    before, cpu = await read_metrics(stage.metered, headers_for), measure_cpu(stage)
    began = time.perf_counter()
    # Not the sampler of servers that may run in this process: it has older samples.
    sampler = LoopLagSampler(always_busy=True)
    async with sample_memory(stage) as memories:
        sampler.start()
        try:
            arrivals = await _send_jobs(sender, recording, plan, tally)
        finally:
            sampler.stop()
    seconds = time.perf_counter() - began
    # Before the metrics are read, which costs CPU time in the servers.
    used = {name: cpu_seconds - cpu[name] for name, cpu_seconds in measure_cpu(stage).items()}
    after = await read_metrics(stage.metered, headers_for)
    lag = summarise_lag(LagReading("", [*accumulate(sampler.counts)], sampler.longest), None)
    measured = _Measurements(seconds, used, memories, MetricsDifference(before, after), lag, arrivals)
    return _build_result(stage, recording, plan, tally, measured)


async def _send_jobs(sender: RowSender, recording: Recording, plan: LoadPlan, tally: Tally) -> ArrivalLog | None:
    async def send_counted(job: Job) -> None:
        tally.add(await sender.send(job))

    if plan.rate is None:
        await _send_closed_loop(_iter_jobs(recording, plan), send_counted, tally.took.append, plan.concurrency)
        return None
    return await send_at_arrivals(
        islice(cycle(recording.jobs), plan.rollouts),
        draw_arrivals(plan.rate, plan.seed),
        send_counted,
        tally.took.append,
        limit=plan.concurrency,
        seconds=plan.seconds,
    )


async def _send_closed_loop(
    jobs: Iterator[Job],
    send: Callable[[Job], Awaitable[None]],
    record: Callable[[float], None],
    concurrency: int,
) -> None:
    """Send *jobs* from concurrent clients, each of which sends its next job after the response to the last one."""

    async def run_client() -> None:
        for job in jobs:
            began = time.perf_counter()
            await send(job)
            record(time.perf_counter() - began)

    async with asyncio.TaskGroup() as group:
        for number in range(concurrency):
            group.create_task(run_client())
            if number % CLIENTS_PER_PASS == 0:
                # Thousands of connections opened in one pass would delay the first responses.
                await asyncio.sleep(0)


def _iter_jobs(recording: Recording, plan: LoadPlan) -> Iterator[Job]:
    deadline = time.monotonic() + (float("inf") if plan.seconds is None else plan.seconds)
    for job in islice(cycle(recording.jobs), plan.rollouts):
        if time.monotonic() >= deadline:
            return
        yield job


def _build_result(
    stage: Stage, recording: Recording, plan: LoadPlan, tally: Tally, measured: _Measurements
) -> LoadResult:
    rollouts, children = max(1, tally.rollouts), {name_children(name) for name in measured.memories}
    # Processes without children have no row for their children.
    cpu = {name: used for name, used in measured.cpu.items() if used or name not in children}
    requests = measured.metrics.count_requests()
    lags = measured.metrics.compute_lags({pid: name for name, pid in stage.pids.items()})
    if measured.generator_lag is not None:
        lags[LOAD] = measured.generator_lag
    return LoadResult(
        environment=recording.environment,
        concurrency=plan.concurrency,
        open_loop=measured.arrivals and measured.arrivals.summarise(plan.rate or 0.0),
        rollouts=tally.rollouts,
        seconds=round(measured.seconds, 3),
        rate=round(tally.rollouts / measured.seconds, 2),
        latency=compute_latency(tally.took),
        cpu={name: round(1e3 * used / rollouts, 4) for name, used in cpu.items()},
        cpu_share={name: round(used / measured.seconds, 4) for name, used in cpu.items()},
        memory={name: summarise_memory(samples) for name, samples in measured.memories.items()},
        loop_lag=lags,
        calls=round(tally.calls / rollouts, 4),
        requests={name: round(number / rollouts, 4) for name, number in requests.items()},
        traffic=measured.metrics.compute_traffic(rollouts),
        stages=_compute_mean_stages(tally, measured),
        reward=compute_mean(tally.rewards),
        expected=None if tally.expected is None else compute_mean(tally.right),
        wrong=None if tally.expected is None else tally.wrong,
        failures=dict(tally.failures),
        messages=tally.messages,
        open=measured.metrics.after.open,
    )


def _compute_mean_stages(tally: Tally, measured: _Measurements) -> dict[str, float]:
    """Return the mean milliseconds per rollout of each stage; empty if the servers do not report their times."""
    seconds = measured.metrics.sum_run_seconds()
    if not seconds["run"] or not tally.took:
        return {}
    mean_milliseconds = {name: 1e3 * total / len(tally.took) for name, total in seconds.items()}
    waits = measured.arrivals.waits if measured.arrivals else array("d")
    return compute_stages(
        1e3 * sum(tally.took) / len(tally.took),
        {name: total / max(1, len(tally.rewards)) for name, total in tally.stages.items()},
        send=1e3 * (compute_mean(waits) or 0.0),
        queue=mean_milliseconds["queue"],
        admission=mean_milliseconds["admission"],
        serialise=mean_milliseconds["serialise"],
        server=mean_milliseconds["run"],
    )
