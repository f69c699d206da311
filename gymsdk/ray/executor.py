"""Run offloaded functions as Ray tasks, spread over the nodes of a cluster.

Each Ray worker keeps one warm worker process of `gymsdk.workers.processes`, in which the function runs under its limits
of time, CPU and memory. A call therefore ends in the same ways on a cluster as on one machine. Ray starts the workers,
spreads the tasks, and runs a task again on another node if its node is lost.
"""

from __future__ import annotations

import asyncio
import logging
import math
import pickle
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, ParamSpec, TypeAlias, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from gymsdk.concurrency import CrossLoopSemaphore
from gymsdk.errors import EpisodeError, Failed, GymsdkError, WorkerLost
from gymsdk.interpreter import get_search_path
from gymsdk.plugins.calls import pause_deadline
from gymsdk.ray.cluster import join, list_nodes
from gymsdk.workers.offload import Work
from gymsdk.workers.processes import CallResult, PickledCall, ProcessExecutor, pickle_call, unpack_result
from gymsdk.workers.resource_waits import GRADINGS, resource_waits

CPUS_PER_TASK = 0.1
"""The CPUs that Ray reserves for a task. A small number, because trainers reserve most CPUs of their cluster."""

MAX_RETRIES = 3
"""The number of times that Ray runs a task again if its worker or its node is lost."""

MAX_QUEUED_CALLS = 4096
"""The number of calls that wait or run. Further calls wait until one of these ends."""

BATCH_SECONDS = 0.2
"""The time that the calls of one task should take together: much longer than the overhead of a task."""

MAX_BATCH = 64
"""The largest number of calls in a task."""

START_SECONDS = 120.0
"""Seconds that a task may wait for a node and for the imports of a new worker, beyond the limits of its calls."""

REFRESH_SECONDS = 5.0
"""Seconds between two requests for the nodes of the cluster."""

WATCH_SECONDS = 2.0
"""Seconds between two checks whether tasks wait for a free CPU."""

P = ParamSpec("P")
R = TypeVar("R")

TimedResult: TypeAlias = tuple[CallResult, float]
"""How a call ended, and the seconds that it took."""

log = logging.getLogger("gymsdk")


class RayExecutor:
    """Runs offloaded functions as tasks of the Ray cluster to which this process is connected.

    Each node runs at most as many tasks as it has CPUs. Small calls that wait for a free CPU share a task.

    Args:
        address: The address of the cluster, if this process is not connected; by default that of `RAY_ADDRESS`.
        cpus: The CPUs that Ray reserves for a task.
    """

    def __init__(self, address: str | None = None, *, cpus: float = CPUS_PER_TASK) -> None:
        self._address = address
        self._cpus = cpus
        self._capacity = CrossLoopSemaphore(MAX_QUEUED_CALLS)
        self._dispatcher: _Dispatcher | None = None
        self._lock = threading.Lock()

    async def run(self, work: Work[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Return the result of the function.

        Raises:
            GymsdkError: The cluster does not accept this process.
            BudgetSpent: The call used up its CPU time or its memory.
            WorkerLost: The call hangs, or its nodes were lost several times.
            Failed: Its arguments or its result cannot be pickled.
        """
        call = pickle_call(work, args, kwargs)
        # An episode must not run out of time because the cluster is busy.
        with pause_deadline():
            await self._capacity.acquire()
            try:
                result = await asyncio.wrap_future(self._get_dispatcher().submit(call))
            finally:
                self._capacity.release()
        try:
            value: R = unpack_result(result, call)
        except ModuleNotFoundError as error:
            if not error.name or not f"{work.module}.".startswith(f"{error.name}."):
                raise
            message = f"a node of the Ray cluster has no module {error.name!r}; install the environment on all nodes"
            raise Failed(message, kind="offload") from error
        return value

    @property
    def waiting(self) -> int:
        """The number of calls that wait for a task."""
        return self._capacity.waiting + (self._dispatcher.queued if self._dispatcher else 0)

    def _get_dispatcher(self) -> _Dispatcher:
        with self._lock:
            if self._dispatcher is None:
                self._dispatcher = _Dispatcher(self._address, self._cpus)
            return self._dispatcher


@dataclass(slots=True, eq=False)
class _QueuedCall:
    call: PickledCall
    future: Future[CallResult]


class _SentBatch(NamedTuple):
    """The number of calls in a task, and when the task was sent."""

    calls: int
    sent_at: float


class _Dispatcher:
    """Sends queued calls to the cluster, on an event loop in a separate thread."""

    def __init__(self, address: str | None, cpus: float) -> None:
        self._address = address
        self._cpus = cpus
        self._queue: deque[_QueuedCall] = deque()
        self._running: dict[asyncio.Task[None], _SentBatch] = {}
        self._returned_at = -math.inf
        self._watch: asyncio.Task[None] | None = None
        self._nodes: dict[str, int] = {}
        self._tasks: Counter[str] = Counter()
        self._listed_at = -math.inf
        self._seconds: dict[str, float] = {}
        # An event loop of its own: offloaded calls come from the loops of several threads.
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="gymsdk-ray", daemon=True).start()

    @property
    def queued(self) -> int:
        """The number of calls that wait for a task."""
        return len(self._queue)

    def submit(self, call: PickledCall) -> Future[CallResult]:
        """Queue *call* and return the future of its result."""
        queued = _QueuedCall(call, Future())
        self._loop.call_soon_threadsafe(self._enqueue, queued)
        return queued.future

    def _enqueue(self, queued: _QueuedCall) -> None:
        self._queue.append(queued)
        self._send()

    def _send(self) -> None:
        """Start tasks for queued calls as long as a node has a free CPU."""
        try:
            self._list_nodes()
        except GymsdkError as error:
            while self._queue:
                _set_exception(self._queue.popleft().future, error)
            return
        while self._queue and (node := self._choose_node()) is not None:
            if batch := self._take_batch():
                self._tasks[node] += 1
                task = self._loop.create_task(self._run_batch(batch, node))
                self._running[task] = _SentBatch(len(batch), time.monotonic())
                task.add_done_callback(self._finish)
        if self._running and (self._watch is None or self._watch.done()):
            self._watch = self._loop.create_task(self._watch_waits())

    async def _watch_waits(self) -> None:
        """Report tasks that wait because the cluster has no free CPU."""
        try:
            while self._running:
                await asyncio.sleep(WATCH_SECONDS)
                await self._report_waits()
        finally:
            resource_waits.clear(GRADINGS)

    async def _report_waits(self) -> None:
        """Report the calls that wait: since none has returned for a while, and no CPU is free, none can start."""
        waited = self._get_waited_seconds()
        if waited < WATCH_SECONDS or await self._has_free_cpu():
            resource_waits.clear(GRADINGS)
            return
        count = len(self._queue) + sum(batch.calls for batch in self._running.values())
        if count:
            resource_waits.report(GRADINGS, count, waited, self._need)

    def _get_waited_seconds(self) -> float:
        """Return for how long tasks have run or waited without any return."""
        oldest = min((batch.sent_at for batch in self._running.values()), default=math.inf)
        return time.monotonic() - max(oldest, self._returned_at)

    async def _has_free_cpu(self) -> bool:
        try:
            free: dict[str, float] = await asyncio.to_thread(ray.available_resources)
        except (RayError, ConnectionError, RuntimeError):
            # The cluster is gone, or this process has left it; the tasks report that themselves.
            return True
        return free.get("CPU", 0.0) >= self._cpus

    @property
    def _need(self) -> str:
        return f"{self._cpus:g} CPUs of the Ray cluster, which has none free"

    def _finish(self, task: asyncio.Task[None]) -> None:
        self._running.pop(task)
        self._returned_at = time.monotonic()
        if error := task.exception():
            log.error("a task of offloaded calls failed unexpectedly: %r", error, exc_info=error)
        self._send()

    def _list_nodes(self) -> None:
        if time.monotonic() - self._listed_at >= REFRESH_SECONDS:
            join(self._address)
            self._nodes = list_nodes()
            self._listed_at = time.monotonic()

    def _choose_node(self) -> str | None:
        """Return the node with the largest share of free CPUs, `None` if all are in use.

        Ray's own strategy SPREAD may give one node several tasks at once. The node then starts further workers, whose
        imports take seconds, and later ends them again.
        """
        free = {node: 1 - self._tasks[node] / cpus for node, cpus in self._nodes.items() if self._tasks[node] < cpus}
        return max(free, key=free.__getitem__) if free else None

    def _take_batch(self) -> list[_QueuedCall]:
        """Remove the calls of the next task from the queue; calls whose callers have given up are dropped."""
        share = math.ceil(len(self._queue) / max(1, sum(self._nodes.values()) - len(self._running)))
        # A function of unknown cost gets a task of its own, which measures it.
        seconds = self._seconds.get(self._queue[0].call.address)
        size = 1 if seconds is None else min(MAX_BATCH, share, max(1, int(BATCH_SECONDS / max(seconds, 1e-6))))
        taken = [self._queue.popleft() for _ in range(min(size, len(self._queue)))]
        return [queued for queued in taken if queued.future.set_running_or_notify_cancel()]

    async def _run_batch(self, batch: Sequence[_QueuedCall], node: str) -> None:
        try:
            await self._run_on_node(batch, node)
        except Exception as error:
            # The callers must not wait for ever.
            for queued in batch:
                _set_exception(queued.future, error)
            raise
        finally:
            self._tasks[node] -= 1

    async def _run_on_node(self, batch: Sequence[_QueuedCall], node: str) -> None:
        calls = [queued.call for queued in batch]
        # The worker process limits each call. This deadline is for a node that does not answer any more.
        deadline = START_SECONDS + sum(call.longest_seconds for call in calls)
        # Soft: if the node is lost or full, Ray chooses another one.
        placement = NodeAffinitySchedulingStrategy(node, soft=True)
        remote = run_calls.options(num_cpus=self._cpus, scheduling_strategy=placement)
        reference = remote.remote(calls, get_search_path())
        try:
            results: list[TimedResult] = await asyncio.wait_for(asyncio.wrap_future(reference.future()), deadline)
        except TimeoutError:
            waits = f" while it waited for {self._need}" if resource_waits.list_waits(GRADINGS) else ""
            ray.cancel(reference, force=True)
            reason = f"had not returned after {deadline:g} s, with the start of its worker{waits}"
            self._fail(batch, reason, "worker_timeout")
        except (RayError, GetTimeoutError) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            self._fail(batch, f"lost its worker on the Ray cluster ({reason})", "worker_killed")
        else:
            for queued, (result, seconds) in zip(batch, results, strict=True):
                # A moving average, because a function may cost more for other tasks.
                mean = self._seconds.get(queued.call.address, seconds)
                self._seconds[queued.call.address] = mean + (seconds - mean) / 8
                with suppress(InvalidStateError):
                    queued.future.set_result(result)

    @staticmethod
    def _fail(batch: Sequence[_QueuedCall], reason: str, kind: str) -> None:
        for queued in batch:
            _set_exception(queued.future, WorkerLost(f"{queued.call.address} {reason}", kind=kind, retryable=True))


def _set_exception(future: Future[CallResult], error: Exception) -> None:
    with suppress(InvalidStateError):
        future.set_exception(error)


_executors: list[ProcessExecutor] = []
"""The executor of a Ray worker, once a task has needed it."""


@ray.remote(max_retries=MAX_RETRIES)
def run_calls(calls: Sequence[PickledCall], path: Sequence[str]) -> list[TimedResult]:
    """Run *calls* one after another in the worker process of this Ray worker.

    Args:
        calls: The calls.
        path: The module search path of the caller; what exists on this node is searched, too.
    """
    if not _executors:
        _executors.append(ProcessExecutor(1))
    sys.path += [entry for entry in path if entry not in sys.path and Path(entry).exists()]
    return asyncio.run(_run_calls(_executors[0], calls))


async def _run_calls(executor: ProcessExecutor, calls: Sequence[PickledCall]) -> list[TimedResult]:
    results: list[TimedResult] = []
    for call in calls:
        began = time.perf_counter()
        try:
            result = await executor.run_call(call)
        except EpisodeError as error:
            result = "error", pickle.dumps((error, ""))
        results.append((result, time.perf_counter() - began))
    return results
