"""Calls of an environment's hooks and tools: threads, deadlines, error classification, and checks of their results."""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager
from functools import partial
from itertools import chain
from numbers import Real
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from gymsdk.concurrency import (
    INTERRUPTS,
    Deadline,
    apply_deadline,
    cancel_and_wait,
    get_deadline,
    never_suspends,
    run_until_deadline,
    run_without_suspending,
    warn_when_blocking,
)
from gymsdk.errors import (
    BrokenEnvironment,
    BudgetSpent,
    EpisodeError,
    Failed,
    GymsdkError,
    Unscorable,
    UsageError,
    convert_error,
    describe_exception,
    format_validation_error,
)
from gymsdk.jsonl import dump_portable_json
from gymsdk.threads import ThreadPool
from gymsdk.timers import timeout_at
from gymsdk.tracing import CpuCounter, ProfiledCoroutine, count_call, is_profiling
from gymsdk.types import ROLLOUT_FIELDS, STEPS_COMPONENT, Action, Message, Reset, State, Step, ToolCall, Verdict
from gymsdk.workers.cpu_watch import CpuWatch, ThreadClock, limit_cpu

MAX_EXCERPT_CHARS = 500
"""The length of an exception that does not derive from `Exception` in a message."""

LIFESPAN_SECONDS = 600.0
"""Seconds that a `lifespan` may take to start, and to end."""

IMMUTABLE_TYPES = frozenset({bool, bytes, float, int, str, type(None)})
"""The types of fields that a copy of a state may share with the state."""

FLAT_CONTAINER_TYPES = frozenset({dict, list, set})
"""The types of fields that a shallow copy separates if their members are immutable."""

VERDICT_FIELDS = tuple(Verdict.model_fields)

log = logging.getLogger("gymsdk")

traceback_log = logging.getLogger("gymsdk.tracebacks")
"""Tracebacks of errors in an environment's code; they are shown only on request."""
traceback_log.propagate = False

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)


# Running hooks and tools


class HookRunner:
    """Runs the functions of one environment: coroutines on the event loop, other functions in its own threads.

    Args:
        name: The environment's name.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.threads = ThreadPool()

    async def run(self, what: str, function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        """Call *function* and return its result.

        Args:
            what: The kind and name of the function, as in `hook 'verify'`.
            function: The function.
            arguments: Its keyword arguments.

        Raises:
            Failed: The function raised, or did not return by the deadline of the current stage.
            EpisodeError: The function raised this error itself.
        """
        deadline = get_deadline()
        try:
            if not deadline.get_remaining_seconds():
                raise TimeoutError  # noqa: TRY301 - converted like the timeout of the function
            if not is_profiling():
                if never_suspends(function):
                    return run_without_suspending(function(**arguments), f"{what} of environment {self.name!r}")
                return await self._call(what, function, arguments, deadline, None)
            with count_call(self.name, what) as counter:
                return await self._call(what, function, arguments, deadline, counter)
        except (EpisodeError, asyncio.CancelledError, KeyboardInterrupt):
            raise
        except BaseException as error:  # a panic in a Rust extension does not derive from `Exception`
            is_late = not deadline.get_remaining_seconds()
            raise self._convert_error(what, function, _get_first_error(error), is_late=is_late) from error

    async def _call(
        self,
        what: str,
        function: Callable[..., Any],
        arguments: dict[str, Any],
        deadline: Deadline,
        counter: CpuCounter | None,
    ) -> Any:
        if inspect.iscoroutinefunction(function):
            result = function(**arguments)
        else:
            call = partial(_call_in_thread, function, arguments)
            result = await self._run_in_thread(what, call if counter is None else counter.measure(call), deadline)
        if not inspect.isawaitable(result):
            return result
        coroutine = result if inspect.iscoroutine(result) else _await_answer(result)
        try:
            running = coroutine if counter is None else ProfiledCoroutine(coroutine, counter)
            name = f"{what} of environment {self.name!r}"
            return await run_until_deadline(warn_when_blocking(running, name), deadline, name=name)
        finally:
            _close_unstarted(coroutine, result)

    async def _run_in_thread(self, what: str, call: Callable[[], Any], deadline: Deadline) -> Any:
        if not deadline.is_pausable:
            # The timeout includes the wait for a free thread.
            with timeout_at(deadline.at):
                return await self.threads.run(call)
        # On a busy machine, a grader takes longer, but not more CPU time.
        seconds, clock = round(deadline.get_remaining_seconds(), 1), ThreadClock()
        watch = CpuWatch(clock.read, cpu=seconds, idle=seconds, read_activity=clock.read_activity)
        try:
            with deadline.pause():
                async with limit_cpu(watch):
                    return await self.threads.run(clock.measure, call)
        except TimeoutError as error:
            where = f"{what} of environment {self.name!r}"
            if watch.excess == "cpu":
                raise BudgetSpent(f"{where} used up its {seconds:g} s of CPU time", kind="cpu_spent") from error
            if watch.excess == "idle":
                message = f"{where} hangs: {watch.describe_hang()}"
                raise Failed(message, kind="hook_timeout", retryable=True) from error
            raise

    def _convert_error(
        self, what: str, function: Callable[..., Any], error: BaseException, *, is_late: bool
    ) -> EpisodeError:
        if isinstance(error, EpisodeError):
            return error
        kind, where = what.split(maxsplit=1)[0], f"{what} of environment {self.name!r}"
        if isinstance(error, TimeoutError) and is_late:
            return Failed(f"{where} did not return by its deadline", kind=f"{kind}_timeout", retryable=True)
        traceback_log.debug("%s raised:", where, exc_info=error)
        message = f"{where} raised {describe_exception(error, function)}"
        return Failed(message, kind=f"{kind}_raised", retryable=True)


class run_stage(apply_deadline):  # noqa: N801 - a context manager, used like a function
    """Apply *deadline* inside the block, and set the stage and the type of an `EpisodeError` that it raises."""

    __slots__ = ("_name",)

    def __init__(self, name: str, deadline: Deadline) -> None:
        super().__init__(deadline)
        self._name = name

    def __exit__(self, *error_info: object) -> None:
        super().__exit__()
        error = error_info[1]
        if isinstance(error, EpisodeError) and (classified := _classify_error(error, self._name)) is not error:
            raise classified from error.__cause__


def _call_in_thread(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Call *function*; convert exceptions that would end the host or look like a cancellation to `RuntimeError`."""
    try:
        return function(**arguments)
    except Exception:
        raise
    except BaseException as error:
        raise RuntimeError(f"it ended with {repr(error)[:MAX_EXCERPT_CHARS]}") from error


async def _await_answer(answer: Awaitable[Any]) -> Any:
    return await answer


def _close_unstarted(*coroutines: object) -> None:
    """Close coroutines that never started, for example because the deadline had passed; Python would warn of them."""
    for each in coroutines:
        if inspect.iscoroutine(each) and inspect.getcoroutinestate(each) == inspect.CORO_CREATED:
            each.close()


def _get_first_error(error: BaseException) -> BaseException:
    """Return the first exception of an exception group, at any depth; other exceptions unchanged."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _classify_error(error: EpisodeError, stage: str) -> EpisodeError:
    """Return *error* with its stage and the type that this stage requires.

    A failed model makes a verdict unscorable, since a judge is a model. In every other stage an error is a failure.
    """
    error.stage = stage
    if stage == "verify" and isinstance(error, Failed) and error.kind.startswith("model_"):
        return convert_error(error, Unscorable, message=f"the judge failed: {error}", kind="judge_failed")
    if stage != "verify" and isinstance(error, Unscorable):
        return convert_error(error, Failed)
    return error


# Checks of results


def check_type(result: Any, kind: type[T], hook: str) -> T:
    """Return the *result* of *hook*; raises `Failed` if it is not of this *kind*."""
    if isinstance(result, kind):
        return result
    raise Failed(f"hook {hook!r} returned {type(result).__name__}, expected {kind.__name__}", kind="bad_answer")


def copy_state(state: State) -> State:
    """Return a deep copy of *state* for one episode; raises `Failed` if it cannot be copied."""
    try:
        containers = _list_flat_containers(state)
        copied = state.model_copy(deep=containers is None)
    except Exception as error:
        message = (
            f"the state that `reset` returned cannot be copied ({error}); keep handles in `shared`, not in the state"
        )
        raise Failed(message, kind="bad_answer") from error
    vars(copied).update({name: value.copy() for name, value in (containers or {}).items()})
    return copied


def _list_flat_containers(state: State) -> dict[str, Any] | None:
    """Return the values of *state* that are lists, sets and dictionaries of immutable values.

    `None` if a value is neither immutable nor such a container, or if two names share one: then only a deep copy is
    right, which takes ten times as long.
    """
    if state.__pydantic_private__ or state.__pydantic_extra__:
        return None
    containers = {name: value for name, value in vars(state).items() if type(value) not in IMMUTABLE_TYPES}
    for value in containers.values():
        if type(value) not in FLAT_CONTAINER_TYPES:
            return None
        members = chain(value, value.values()) if isinstance(value, dict) else value
        if not IMMUTABLE_TYPES.issuperset(map(type, members)):
            return None
    return containers if len({*map(id, containers.values())}) == len(containers) else None


def check_reset(result: Any) -> Reset:
    """Return the result of `reset`; raises `Failed` if it is invalid."""
    return _revalidate(check_type(result, Reset, "reset"), "reset")


def check_step(result: Any, action: Action) -> Step:
    """Return the result of `step` for *action*; raises `Failed` if it is invalid."""
    step = _revalidate(check_type(result, Step, "step"), "step")
    if not math.isfinite(step.reward):
        raise Failed(f"hook 'step' returned the reward {step.reward}; a reward must be finite", kind="bad_answer")
    if step.output is not None and isinstance(action, Message):
        raise Failed("hook 'step' returned an output for a reply; return messages", kind="bad_answer")
    return step


def check_verdict(result: Any) -> Verdict:
    """Return the result of `verify`: complete, with a finite reward and fields that JSON supports.

    Raises:
        Unscorable: The reward is not finite.
        Failed: The verdict is invalid in another way.
    """
    verdict = check_type(result, Verdict, "verify")
    _check_verdict_base(verdict)
    if not math.isfinite(verdict.reward):
        raise Unscorable(f"the verdict's reward is {verdict.reward}", kind="not_finite")
    if STEPS_COMPONENT in verdict.components:
        message = f"the component {STEPS_COMPONENT!r} is reserved for the rewards of the steps; rename the verdict's"
        raise Failed(message, kind="bad_answer")
    total = sum(verdict.components.values())
    if verdict.components and not math.isclose(total, verdict.reward, abs_tol=1e-6):
        message = f"the verdict's components sum to {total:g}, its reward is {verdict.reward:g}"
        raise Failed(message, kind="bad_answer")
    _check_verdict_fields(verdict)
    return verdict


def add_rewards(paid: float, reward: float, stage: str) -> float:
    """Return the sum of two finite rewards; raises `Failed` at *stage* if the sum is not finite."""
    if math.isfinite(total := paid + reward):
        return total
    message = f"the episode's rewards sum to {total}: {reward:g} after {paid:g}; return rewards whose sum is finite"
    raise Failed(message, kind="not_finite", stage=stage)


def check_solution(result: Any) -> list[Action] | None:
    """Return the turn that `solve` returned, `None` if it has no solution; raises `Failed` if it is invalid."""
    if result is None or isinstance(result, Message):
        return None if result is None else [result]
    if isinstance(result, ToolCall) or not isinstance(result, Iterable):
        message = f"hook 'solve' returned {type(result).__name__}, expected Message or list[ToolCall]"
        raise Failed(message, kind="bad_answer")
    return [check_type(call, ToolCall, "solve") for call in result]


def check_metrics(result: Any) -> dict[str, float]:
    """Return the metrics that `metrics` returned; raises `Failed` if they are invalid."""
    metrics = {} if result is None else check_type(result, dict, "metrics")
    return {str(name): _check_metric(name, value) for name, value in metrics.items()}


def _revalidate(result: M, hook: str) -> M:
    """Validate a model again: `model_construct` and `model_copy` create models without validation."""
    kind = type(result)
    try:
        return kind.model_validate(vars(result))
    except ValidationError as error:
        message = f"hook {hook!r} returned an invalid {kind.__name__}: {format_validation_error(error)}"
        raise Failed(message, kind="bad_answer") from error


def _check_verdict_base(verdict: Verdict) -> None:
    """Check the fields that every verdict has.

    The author's fields are not validated again, because an author's validator need not accept its own result.
    """
    base = {name: getattr(verdict, name) for name in VERDICT_FIELDS if hasattr(verdict, name)}
    try:
        Verdict.model_validate(base, strict=True)
    except ValidationError as error:
        message = f"hook 'verify' returned an invalid verdict: {format_validation_error(error)}"
        raise Failed(message, kind="bad_answer") from error


def _check_verdict_fields(verdict: Verdict) -> None:
    """Check that a rollout's line can hold the verdict's fields."""
    name = type(verdict).__name__
    try:
        fields = verdict.model_dump(mode="json", exclude={"reward", "components"}, warnings=False)
        dump_portable_json(fields)
    except Exception as error:  # an author's serializer may raise any exception
        message = f"the verdict ({name}) cannot be written as JSON: {error}; give its fields values that JSON supports"
        raise Failed(message, kind="bad_answer") from error
    if reserved := sorted(fields.keys() & ROLLOUT_FIELDS):
        message = f"the verdict ({name}) has a field {reserved[0]!r}, which every rollout's line has; rename the field"
        raise Failed(message, kind="bad_answer")


def _check_metric(name: object, value: object) -> float:
    if not isinstance(value, Real):
        raise Failed(f"hook 'metrics' returned {value!r} for {name!r}, expected a number", kind="bad_answer")
    try:
        return float(value)
    except OverflowError:
        message = f"hook 'metrics' returned a number for {name!r} that is too large for a float"
        raise Failed(message, kind="bad_answer") from None


# The lifespan


class Lifespan:
    """The `lifespan` of one environment.

    One task enters the context manager, holds it open and leaves it, regardless of the tasks that call `enter` and
    `exit`: anyio's cancel scopes, and the clients built on them, must be left in the task that entered them.

    Args:
        name: The environment's name.
        factory: Returns a new context manager; `None` if the environment has no `lifespan`.

    Attributes:
        shared: The value that the context manager yielded.
    """

    def __init__(self, name: str, factory: Callable[[], AbstractAsyncContextManager[Any] | None] | None) -> None:
        self._where = f"environment {name!r}"
        self._factory = factory
        self._entered = 0
        self._lock = asyncio.Lock()
        self._holder: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()
        self.shared: Any = None

    def check_entered(self) -> None:
        """Raise `UsageError` if the lifespan has not been entered, `Failed` if it ended by itself."""
        if not self._factory:
            return
        if not self._entered:
            raise UsageError(f"{self._where} has a lifespan; play it inside `async with environment:`")
        if self._holder is not None and self._holder.done():
            message = f"{self._where}: hook 'lifespan' ended during the run; see the log, and start the run again"
            raise Failed(message, kind="lifespan_ended", stage="reset", retryable=True)

    async def enter(self) -> None:
        """Enter the lifespan unless another caller has; raises `BrokenEnvironment` if that fails."""
        async with self._lock:
            if not self._entered and self._factory:
                await self._open(self._factory)
            self._entered += 1

    async def exit(self) -> None:
        """Leave the lifespan if no other caller uses it.

        An error is logged and not raised, because it does not change results.
        """
        async with self._lock:
            self._entered -= 1
            if not self._entered:
                await self._close()

    async def _open(self, factory: Callable[[], AbstractAsyncContextManager[Any] | None]) -> None:
        opened: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._closing = closing = asyncio.Event()
        hold = self._hold_open(factory, opened, closing)
        self._holder = holder = asyncio.create_task(hold, name=f"lifespan of {self._where}")
        try:
            async with asyncio.timeout(LIFESPAN_SECONDS):
                self.shared = await opened
        except TimeoutError as error:
            raise self._build_error(error) from error
        finally:
            if not opened.done() or opened.cancelled() or opened.exception():
                self._holder = None
                await cancel_and_wait(holder)

    async def _hold_open(
        self,
        factory: Callable[[], AbstractAsyncContextManager[Any] | None],
        opened: asyncio.Future[Any],
        closing: asyncio.Event,
    ) -> None:
        """Enter the context manager, set *opened* to the value that it yields, and leave it once *closing* is set."""
        try:
            context = factory()
            if context is None:
                opened.set_result(None)
                await closing.wait()
                return
            async with context as shared:
                opened.set_result(shared)
                await closing.wait()
        except asyncio.CancelledError as error:
            # A background task of the author's code may have failed and cancelled its task group, with this task.
            if not opened.done():
                opened.set_exception(self._build_error(error))
            elif not (closing.is_set() or opened.cancelled()):
                log.warning("%s: hook 'lifespan' was cancelled before the end of the run", self._where)
            raise
        except INTERRUPTS as error:
            if not opened.done():
                opened.set_exception(self._build_error(error))
            raise
        except BaseException as error:  # noqa: BLE001 - an author's code may raise any exception
            if opened.done():
                log.warning("%s: hook 'lifespan' failed when it ended: %r", self._where, error)
            else:
                opened.set_exception(error if isinstance(error, GymsdkError) else self._build_error(error))

    def _build_error(self, error: BaseException) -> BrokenEnvironment:
        broken = BrokenEnvironment(f"{self._where}: hook 'lifespan' raised {describe_exception(error)}")
        broken.__cause__ = error
        return broken

    async def _close(self) -> None:
        self.shared = None
        holder, self._holder = self._holder, None
        if holder is None:
            return
        self._closing.set()
        await asyncio.wait({holder}, timeout=LIFESPAN_SECONDS)
        if not holder.done():
            log.warning("%s: hook 'lifespan' did not end within %g s and is abandoned", self._where, LIFESPAN_SECONDS)
            await cancel_and_wait(holder)
