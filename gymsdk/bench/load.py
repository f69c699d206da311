"""Benchmark served environments: prepare the servers and the jobs, and run one load after the other."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

from gymsdk import jsonl
from gymsdk.bench import shapes
from gymsdk.bench.generator import LoadPlan, run_load
from gymsdk.bench.recording import Recording, list_jobs, record_rollouts
from gymsdk.bench.report import BenchResult, LoadResult
from gymsdk.bench.shapes import Shape
from gymsdk.bench.stage import Stage, join_servers, start_policy, start_servers
from gymsdk.environment import Environment
from gymsdk.errors import UsageError
from gymsdk.http import client
from gymsdk.models import registry as models
from gymsdk.plugins import registry
from gymsdk.sockets import count_affordable
from gymsdk.testing.endpoint import NAME
from gymsdk.types import Rollout

SCRIPTED_PREFIX = "scripted/"
"""Prefix of the models that this process can play."""

DEFAULT_MODEL = "scripted/oracle"
"""The model that is recorded if none is named."""

MAX_DISTINCT_TASKS = 128
"""How many tasks are recorded at most. A load with more rollouts repeats them."""

WARMUP_ROLLOUTS = 32
"""Uncounted rollouts before the first load. They trigger imports and start workers."""

DEFAULT_MAX_OUTSTANDING = 4096
"""The most outstanding rollouts of an open loop. Without a bound, servers that cannot keep up would exhaust memory."""

ProgressCallback: TypeAlias = Callable[[str], None]
"""Receives messages about the progress."""


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """The plan of a benchmark.

    Attributes:
        environments: The settings of each environment, by name.
        shapes: Shapes of rollouts to measure with the benchmark's own environment.
        concurrency_levels: The concurrency of each load of a closed loop.
        rates: The arrivals per second of each load of an open loop. If there are any, there is no closed loop.
        max_outstanding: The most outstanding rollouts of an open loop.
        seed: The seed of the arrivals.
        rollouts: The number of rollouts of each load.
        minutes: The duration of each load, instead of *rollouts*.
        head: The head of running servers to measure, instead of servers that the benchmark starts.
        model: A scripted policy that plays inside the servers. Without it, the servers call an endpoint that
            replays the oracle. With *head*, the policy that the rewards are compared with.
        split: The split of the tasks.
        attempts: How often a failed rollout is tried.
        keep: Selects the tasks by their recorded rollouts.
    """

    environments: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    shapes: Sequence[Shape] = ()
    concurrency_levels: tuple[int, ...] = (16,)
    rates: tuple[float, ...] = ()
    max_outstanding: int = DEFAULT_MAX_OUTSTANDING
    seed: int = 0
    rollouts: int = 200
    minutes: float | None = None
    head: str | None = None
    model: str | None = None
    split: str | None = None
    attempts: int = 1
    keep: Callable[[Rollout], bool] = field(default=lambda _: True)

    def list_loads(self) -> list[LoadPlan]:
        """Return the loads that each environment gets.

        Raises:
            UsageError: This process may not open a connection for each concurrent rollout.
        """
        most = count_affordable(1)
        if not self.rates and max(self.concurrency_levels) > most:
            raise UsageError(
                f"--concurrency {max(self.concurrency_levels)} needs more connections than this process may open"
                f" ({most}); raise the limit of open files with `ulimit -Hn`, or lower --concurrency"
            )
        rollouts = self.rollouts if self.minutes is None else None
        seconds = None if self.minutes is None else 60 * self.minutes
        if self.rates:
            limit = min(self.max_outstanding, most)
            return [LoadPlan(limit, rollouts, seconds, self.attempts, rate, self.seed) for rate in self.rates]
        return [LoadPlan(concurrency, rollouts, seconds, self.attempts) for concurrency in self.concurrency_levels]


@dataclass(frozen=True, slots=True)
class _Target:
    """An environment to measure, its settings, and the shape that they produce if it is the benchmark's own."""

    environment: Environment
    settings: Mapping[str, Any]
    shape: Shape | None = None

    @property
    def title(self) -> str:
        return self.environment.name if self.shape is None else str(self.shape)


async def measure(
    plan: BenchPlan, report_progress: ProgressCallback = lambda _: None
) -> AsyncGenerator[BenchResult, None]:
    """Measure the environments and shapes of *plan* one after the other and yield their results.

    The shape `simple` comes first, so that the results of other shapes can be compared with it.

    Args:
        plan: What to measure.
        report_progress: Receives messages about the progress.

    Raises:
        UsageError: The model is not a scripted policy, running servers are to play the shapes, or the concurrency
            exceeds the limit of open files.
    """
    _check_plan(plan)
    loads = plan.list_loads()
    simple: BenchResult | None = None
    try:
        # One after the other: servers that share the machine would slow each other down.
        for target in _list_targets(plan):
            result = await _measure_target(plan, target, loads, report_progress)
            if target.shape is not None and target.shape.is_simple:
                simple = result
            elif target.shape is not None and simple is not None:
                result = shapes.add_factors(result, target.shape, simple)
            yield result
    finally:
        await client.aclose()


def _check_plan(plan: BenchPlan) -> None:
    if plan.model is not None and not plan.model.startswith(SCRIPTED_PREFIX):
        raise UsageError(
            f"--model {plan.model}: only rewards of scripted policies can be checked; name a scripted policy"
        )
    if plan.shapes and plan.head is not None:
        raise UsageError("--shape starts servers of its own environment; leave out --head, or name an environment")


def _list_targets(plan: BenchPlan) -> list[_Target]:
    ordered = sorted(plan.shapes, key=lambda shape: not shape.is_simple)
    return [
        *(_Target(registry.load(name, **settings), settings) for name, settings in plan.environments.items()),
        *(_Target(shapes.build_environment(shape), {"shape": str(shape)}, shape) for shape in ordered),
    ]


async def _measure_target(
    plan: BenchPlan, target: _Target, loads: Sequence[LoadPlan], report_progress: ProgressCallback
) -> BenchResult:
    async with AsyncExitStack() as stack:
        setup = await _set_up(plan, target, report_progress, stack)
        results = [result async for result in _run_loads(target, setup, loads, report_progress)]
    start = setup.stage.start
    return BenchResult(
        environment=target.environment.name,
        shape=None if target.shape is None else str(target.shape),
        model=setup.model,
        ready=start and round(start.seconds, 3),
        ready_cpu=start and round(start.cpu, 3),
        ready_memory=start and round(start.memory, 1),
        memory_measure=setup.stage.memory_measure,
        loads=tuple(results),
    )


@dataclass(frozen=True, slots=True)
class _Setup:
    """The servers to measure, the jobs to send, and the model that plays."""

    stage: Stage
    recording: Recording
    model: str


async def _set_up(plan: BenchPlan, target: _Target, report_progress: ProgressCallback, stack: AsyncExitStack) -> _Setup:
    """Prepare the servers and the jobs for *target*. The exit stack *stack* stops what this starts."""
    environment = target.environment
    if plan.head is not None:
        stage = await join_servers(plan.head)
        # Before the recording, which may take long.
        stage.served.check_environments([environment.name])
        return _Setup(stage, await _record_rewards(plan, environment, plan.model or stage.model), stage.model)
    report_progress(f"{target.title}: recording, then starting its servers")
    model = plan.model or DEFAULT_MODEL
    recording = await _record_rewards(plan, environment, model)
    folder = Path(stack.enter_context(TemporaryDirectory(prefix="gymsdk-")))
    site = None if target.shape is None else shapes.install(folder / "site")
    words = [environment.name, *_format_settings(target.settings)]
    if plan.model is not None:
        servers = start_servers(words, model=model, site=site)
        return _Setup(await stack.enter_async_context(servers), recording, model)
    recording.write(folder / "recording.jsonl")
    endpoint = await stack.enter_async_context(start_policy(folder / "recording.jsonl"))
    servers = start_servers(words, model=f"endpoint/{NAME}", endpoint=endpoint, site=site)
    return _Setup(await stack.enter_async_context(servers), recording, f"endpoint/{NAME}, which replays {model}")


def _format_settings(settings: Mapping[str, Any]) -> list[str]:
    """Return *settings* as options of a command."""
    texts = {
        key: value if isinstance(value, str) else jsonl.dump_json(value).decode() for key, value in settings.items()
    }
    return [word for key, text in texts.items() for word in ("--set", f"{key}={text}")]


async def _record_rewards(plan: BenchPlan, environment: Environment, model: str) -> Recording:
    """Return the jobs, with expected rewards if *model* can be played in this process."""
    limit = min(plan.rollouts, MAX_DISTINCT_TASKS)
    if not model.startswith(SCRIPTED_PREFIX):
        return list_jobs(environment, split=plan.split, limit=limit)
    policy = models.model(model)
    return await record_rollouts(environment, policy, split=plan.split, limit=limit, keep=plan.keep)


async def _run_loads(
    target: _Target, setup: _Setup, loads: Sequence[LoadPlan], report_progress: ProgressCallback
) -> AsyncGenerator[LoadResult, None]:
    # The first requests import modules and fill caches; they belong to no load.
    await run_load(
        setup.stage,
        setup.recording,
        LoadPlan(concurrency=min(WARMUP_ROLLOUTS, max(load.concurrency for load in loads)), rollouts=WARMUP_ROLLOUTS),
    )
    for load in loads:
        size = f"{load.concurrency} at once" if load.rate is None else f"{load.rate:g} per second"
        report_progress(f"{target.title}: {size}")
        yield await run_load(setup.stage, setup.recording, load)
