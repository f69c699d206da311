"""Benchmark served environments: send rollouts in a closed loop and measure the servers meanwhile."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import count, cycle, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias
from uuid import uuid4

from gymsdk import jsonl
from gymsdk.bench import report
from gymsdk.bench.report import BenchResult, LoadResult, Memory, MetricsReading, compute_latency, compute_mean
from gymsdk.bench.stage import LOAD, ProcessUsage, Stage, join_servers, measure_process, start_policy, start_servers
from gymsdk.environment import Environment
from gymsdk.errors import BadRow, GymsdkError, UsageError
from gymsdk.http import client
from gymsdk.models import registry as models
from gymsdk.models.recordings import compute_digests
from gymsdk.plugins import registry
from gymsdk.rollouts import folder
from gymsdk.rollouts.agent_client import AgentClient
from gymsdk.rollouts.jobs import Job, PlayedJob, build_input_row, iter_jobs
from gymsdk.rollouts.remote import RemotePlayer
from gymsdk.rollouts.run import LocalPlayer, collect
from gymsdk.rollouts.tasks import get_default_split, read_splits
from gymsdk.testing.endpoint import NAME
from gymsdk.types import Model, Rollout, Row

RECORDING_CONCURRENCY = 8
"""How many episodes are recorded concurrently."""

SAMPLE_SECONDS = 0.5
"""Seconds between two measurements of memory."""

REWARD_TOLERANCE = 1e-9
"""The difference up to which two rewards count as equal."""

Memories: TypeAlias = dict[str, list[float]]

SCRIPTED_PREFIX = "scripted/"
"""Prefix of the models that this process can play."""

DEFAULT_MODEL = "scripted/oracle"
"""The model that is recorded if none is named."""

MAX_DISTINCT_TASKS = 128
"""How many tasks are recorded at most. A load with more rollouts repeats them."""

WARMUP_ROLLOUTS = 32
"""Uncounted rollouts before the first load. They trigger imports and start workers."""

ProgressCallback: TypeAlias = Callable[[str], None]
"""Receives messages about the progress."""


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """The plan of a benchmark.

    Attributes:
        environments: The settings of each environment, by name.
        concurrency_levels: The concurrency of each load.
        rollouts: The number of rollouts of each load.
        minutes: The duration of each load, instead of *rollouts*.
        head: The head of running servers to measure, instead of servers that the benchmark starts.
        model: A scripted policy that plays inside the servers. Without it, the servers call an endpoint that
            replays the oracle. With *head*, the policy that the rewards are compared with.
        split: The split of the tasks.
        attempts: How often a failed rollout is tried.
        keep: Selects the tasks by their recorded rollouts.
    """

    environments: Mapping[str, Mapping[str, Any]]
    concurrency_levels: tuple[int, ...] = (16,)
    rollouts: int = 200
    minutes: float | None = None
    head: str | None = None
    model: str | None = None
    split: str | None = None
    attempts: int = 1
    keep: Callable[[Rollout], bool] = field(default=lambda _: True)


async def measure(
    plan: BenchPlan, report_progress: ProgressCallback = lambda _: None
) -> AsyncGenerator[BenchResult, None]:
    """Measure the environments of *plan* one after the other and yield their results.

    Args:
        plan: What to measure.
        report_progress: Receives messages about the progress.

    Raises:
        UsageError: The model is not a scripted policy.
    """
    if plan.model is not None and not plan.model.startswith(SCRIPTED_PREFIX):
        raise UsageError(
            f"--model {plan.model}: only rewards of scripted policies can be checked; name a scripted policy"
        )
    try:
        for name, settings in plan.environments.items():
            yield await _measure_environment(plan, registry.load(name, **settings), report_progress)
    finally:
        await client.aclose()


async def _measure_environment(
    plan: BenchPlan, environment: Environment, report_progress: ProgressCallback
) -> BenchResult:
    async with AsyncExitStack() as stack:
        setup = await _set_up(plan, environment, report_progress, stack)
        loads = [each async for each in _run_loads(plan, setup, report_progress)]
    start = setup.stage.start
    return BenchResult(
        environment=environment.name,
        model=setup.model,
        ready=start and round(start.seconds, 3),
        ready_cpu=start and round(start.cpu, 3),
        ready_memory=start and round(start.memory, 1),
        loads=tuple(loads),
    )


@dataclass(frozen=True, slots=True)
class _Setup:
    """The servers to measure, the jobs to send, and the model that plays."""

    stage: Stage
    recording: Recording
    model: str


async def _set_up(
    plan: BenchPlan, environment: Environment, report_progress: ProgressCallback, stack: AsyncExitStack
) -> _Setup:
    """Prepare the servers and the jobs for *environment*. The exit stack *stack* stops what this starts."""
    if plan.head is not None:
        stage = await join_servers(plan.head)
        return _Setup(stage, await _record_rewards(plan, environment, plan.model or stage.model), stage.model)
    report_progress(f"{environment.name}: recording, then starting its servers")
    model = plan.model or DEFAULT_MODEL
    recording = await _record_rewards(plan, environment, model)
    words = [environment.name, *_format_settings(plan.environments[environment.name])]
    if plan.model is not None:
        return _Setup(await stack.enter_async_context(start_servers(words, model=model)), recording, model)
    folder = stack.enter_context(TemporaryDirectory(prefix="gymsdk-"))
    recording.write(Path(folder) / "recording.jsonl")
    endpoint = await stack.enter_async_context(start_policy(Path(folder) / "recording.jsonl"))
    stage = await stack.enter_async_context(start_servers(words, model=f"endpoint/{NAME}", endpoint=endpoint))
    return _Setup(stage, recording, f"endpoint/{NAME}, which replays {model}")


def _format_settings(settings: Mapping[str, Any]) -> list[str]:
    """Return *settings* as options of a command."""
    texts = {key: each if isinstance(each, str) else jsonl.dump_json(each).decode() for key, each in settings.items()}
    return [word for key, each in texts.items() for word in ("--set", f"{key}={each}")]


async def _record_rewards(plan: BenchPlan, environment: Environment, model: str) -> Recording:
    """Return the jobs, with expected rewards if *model* can be played in this process."""
    limit = min(plan.rollouts, MAX_DISTINCT_TASKS)
    if not model.startswith(SCRIPTED_PREFIX):
        return list_jobs(environment, split=plan.split, limit=limit)
    policy = models.model(model)
    return await record_rollouts(environment, policy, split=plan.split, limit=limit, keep=plan.keep)


async def _run_loads(
    plan: BenchPlan, setup: _Setup, report_progress: ProgressCallback
) -> AsyncGenerator[LoadResult, None]:
    await run_load(
        setup.stage,
        setup.recording,
        LoadPlan(concurrency=min(WARMUP_ROLLOUTS, max(plan.concurrency_levels)), rollouts=WARMUP_ROLLOUTS),
    )
    for concurrency in plan.concurrency_levels:
        load_plan = LoadPlan(concurrency, rollouts=plan.rollouts, attempts=plan.attempts)
        if plan.minutes is not None:
            load_plan = LoadPlan(concurrency, seconds=60 * plan.minutes, attempts=plan.attempts)
        report_progress(f"{setup.recording.environment}: {concurrency} at once")
        yield await run_load(setup.stage, setup.recording, load_plan)


@dataclass(frozen=True, slots=True)
class Recording:
    """Jobs of one environment, with the rewards of their episodes in this process, or `None` if they are unknown."""

    environment: str
    jobs: tuple[Job, ...]
    rewards: tuple[float, ...] | None = None
    lines: tuple[Row, ...] = ()

    def write(self, path: Path) -> None:
        """Write the rollouts to *path* for `scripted/replay`."""
        path.write_bytes(b"".join(jsonl.dump_portable_json(line) + b"\n" for line in self.lines))


def list_jobs(environment: Environment, *, split: str | None, limit: int, seed: int = 0) -> Recording:
    """Return the first *limit* tasks of a split without rewards. Raises `BadRow` if the split is empty."""
    selected = read_splits({environment.name: environment}, split, seed=seed, limit=limit)
    sent = [build_input_row(row, environment=environment.name, task=number) for number, (_, row) in enumerate(selected)]
    if not sent:
        split_name = split or get_default_split(environment)
        raise BadRow(f"split {split_name!r} of {environment.name!r} has no rows; choose another split with --split")
    return Recording(environment.name, tuple(iter_jobs(sent)))


async def record_rollouts(
    environment: Environment,
    model: Model,
    *,
    split: str | None,
    limit: int,
    seed: int = 0,
    keep: Callable[[Rollout], bool] = lambda _: True,
) -> Recording:
    """Play the first *limit* tasks of a split with *model* in this process and record the rollouts.

    Of tasks with the same opening, only the first is recorded, because a replay recognises a task by its opening.

    Args:
        environment: The environment.
        model: The model that plays.
        split: The split, or `None` for the default split.
        limit: How many tasks to play.
        seed: The seed of tasks and episodes.
        keep: Selects the rollouts to record.

    Raises:
        UsageError: An episode has no reward, or *keep* selects none.
    """
    recording = list_jobs(environment, split=split, limit=limit, seed=seed)
    play = LocalPlayer({environment.name: environment}, model, seed=seed, attempts=1)
    async with play.open(), aclosing(collect(recording.jobs, play, concurrency=RECORDING_CONCURRENCY)) as results:
        played = sorted([_select_scored(each) async for each in results], key=lambda each: each.job.task)
    chosen = _has_distinct_rows([each for each in played if keep(each.rollout)])
    if not chosen:
        raise UsageError(
            f"no task of {environment.name!r} can be replayed deterministically; choose another split with --split"
        )
    return Recording(
        environment=environment.name,
        jobs=tuple(each.job for each in chosen),
        rewards=tuple(each.rollout.reward or 0.0 for each in chosen),
        lines=tuple(folder.build_scored_line(each.rollout, each.job.key) for each in chosen),
    )


def _select_scored(result: PlayedJob) -> PlayedJob:
    failure = result.rollout.failure
    if failure is not None:
        raise UsageError(
            f"task {result.job.task} of {result.job.environment!r} cannot be recorded"
            f" ({failure.kind}: {failure.message}); choose another split, or another scripted model"
        )
    return result


def _has_distinct_rows(results: Sequence[PlayedJob]) -> list[PlayedJob]:
    distinct: dict[bytes, PlayedJob] = {}
    for each in results:
        request = each.rollout.row["responses_create_params"]
        distinct.setdefault(compute_digests(each.rollout.opening, request.get("instructions"))[-1], each)
    return list(distinct.values())


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """The number of rollouts to send, or the seconds in which to send them, and their concurrency."""

    concurrency: int
    rollouts: int | None = None
    seconds: float | None = None
    attempts: int = 1


@dataclass(slots=True)
class Tally:
    """The counts of the rollouts so far."""

    expected: Mapping[int, float] | None
    took: array[float] = field(default_factory=lambda: array("d"))
    rewards: array[float] = field(default_factory=lambda: array("d"))
    right: array[float] = field(default_factory=lambda: array("d"))
    wrong: int = 0
    calls: int = 0
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
        self.rewards.append(rollout.reward)
        if self.expected is not None:
            right = self.expected[result.job.task]
            self.right.append(right)
            self.wrong += abs(rollout.reward - right) > REWARD_TOLERANCE

    @property
    def rollouts(self) -> int:
        """How many rollouts ended, including failures."""
        return len(self.rewards) + self.failures.total()


async def run_load(stage: Stage, recording: Recording, order: LoadPlan) -> LoadResult:
    """Send the jobs of *recording* to the servers of *stage* and return the result."""
    tally = Tally(None if recording.rewards is None else _index_rewards(recording))
    headers_for = stage.served.client.build_headers_for
    requests, cpu = await report.read_metrics(stage.metered, headers_for), _measure_cpu(stage)
    began = time.perf_counter()
    async with _sample_memory(stage) as memories:
        await _play_jobs(stage, recording, order, tally)
    seconds = time.perf_counter() - began
    cpu_used = {name: each - cpu[name] for name, each in _measure_cpu(stage).items()}
    after = await report.read_metrics(stage.metered, headers_for)
    return _build_result(recording, order, tally, seconds, cpu_used, memories, (requests, after))


def _index_rewards(recording: Recording) -> dict[int, float]:
    return {job.task: reward for job, reward in zip(recording.jobs, recording.rewards or (), strict=True)}


async def _play_jobs(stage: Stage, recording: Recording, order: LoadPlan, tally: Tally) -> None:
    # Every rollout has a new id, because a server answers a known id with its earlier response.
    agents = AgentClient(stage.served.client, once=stage.served.is_idempotent)
    delivery = RemotePlayer(agents, attempts=order.attempts)
    run, numbers = uuid4().hex[:12], count()

    async def play(job: Job) -> PlayedJob:
        began = time.perf_counter()
        result = await replace(delivery, name=f"bench.{run}.{next(numbers)}")(job)
        tally.took.append(time.perf_counter() - began)
        return result

    async with aclosing(collect(_iter_jobs(recording, order), play, concurrency=order.concurrency)) as results:
        async for result in results:
            tally.add(result)


def _iter_jobs(recording: Recording, plan: LoadPlan) -> Iterator[Job]:
    deadline = time.monotonic() + (float("inf") if plan.seconds is None else plan.seconds)
    for job in islice(cycle(recording.jobs), plan.rollouts):
        if time.monotonic() >= deadline:
            return
        yield job


def _measure_cpu(stage: Stage) -> dict[str, float]:
    """Return the seconds of CPU used so far by each process of *stage*, by its workers, and by this process."""
    seconds = {LOAD: time.process_time()}
    for name, used in _measure_processes(stage):
        seconds |= {name: used.cpu, name_workers(name): used.workers_cpu}
    return seconds


def _measure_processes(stage: Stage) -> Iterator[tuple[str, ProcessUsage]]:
    for name, pid in stage.pids.items():
        try:
            yield name, measure_process(pid)
        except ProcessLookupError:
            raise GymsdkError(f"the process of the {name} ended under load; see its log") from None


def name_workers(name: str) -> str:
    """Return the label of the worker processes of the process *name*."""
    return f"{name}' workers" if name.endswith("s") else f"{name}'s workers"


@asynccontextmanager
async def _sample_memory(stage: Stage) -> AsyncIterator[Memories]:
    """Sample the memory of each process of *stage*, including its workers."""
    memories: Memories = {name: [] for name in stage.pids}

    def look() -> None:
        for name, used in _measure_processes(stage):
            memories[name].append(used.memory + used.workers_memory)

    async def watch() -> None:
        while True:
            await asyncio.sleep(SAMPLE_SECONDS)
            look()

    look()
    watching = asyncio.ensure_future(watch())
    try:
        yield memories
    finally:
        watching.cancel()
        await asyncio.wait({watching})
    look()


def _build_result(
    recording: Recording,
    order: LoadPlan,
    tally: Tally,
    seconds: float,
    cpu_used: Mapping[str, float],
    memories: Memories,
    readings: tuple[MetricsReading, MetricsReading],
) -> LoadResult:
    each = max(1, tally.rollouts)
    requests = report.count_requests_between(*readings)
    others = {name_workers(name) for name in memories}
    return LoadResult(
        environment=recording.environment,
        concurrency=order.concurrency,
        rollouts=tally.rollouts,
        seconds=round(seconds, 3),
        rate=round(tally.rollouts / seconds, 2),
        latency=compute_latency(tally.took),
        cpu={name: round(1e3 * used / each, 4) for name, used in cpu_used.items() if used or name not in others},
        memory={name: _summarize_memory(found) for name, found in memories.items()},
        calls=round(tally.calls / each, 4),
        requests={name: round(number / each, 4) for name, number in requests.items()},
        reward=compute_mean(tally.rewards),
        expected=None if tally.expected is None else compute_mean(tally.right),
        wrong=None if tally.expected is None else tally.wrong,
        failures=dict(tally.failures),
        messages=tally.messages,
        open=readings[1].open,
    )


def _summarize_memory(samples: list[float]) -> Memory:
    before, half, after = (round(samples[index], 1) for index in (0, len(samples) // 2, -1))
    return Memory(before=before, half=half, after=after, most=round(max(samples), 1))
