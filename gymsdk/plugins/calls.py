"""What an environment shares among its episodes: the value of its `lifespan`, for as long as that lasts."""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from numbers import Real
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from gymsdk import deadlines, errors, jsonl, profiling
from gymsdk.deadlines import Deadline, run_until_deadline, warn_when_blocking
from gymsdk.errors import (
    INTERRUPTS,
    BrokenEnvironment,
    EpisodeError,
    Failed,
    GymsdkError,
    Unscorable,
    UsageError,
    convert_error,
    describe_exception,
)
from gymsdk.threads import ThreadPool
from gymsdk.types import ROLLOUT_FIELDS, Action, Message, Reset, State, Step, ToolCall, Verdict

STEPS_COMPONENT = "steps"
"""The component of a reward that the steps paid; the host fills it."""

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)


def check_type(answer: Any, kind: type[T], hook: str) -> T:
    """Give *answer* where it is of its *kind*; raises `Failed`."""
    if isinstance(answer, kind):
        return answer
    raise Failed(f"hook {hook!r} answered {type(answer).__name__}, not {kind.__name__}", kind="bad_answer")


def copy_state(state: State) -> State:
    """Give a copy of *state* that is the episode's own; raises `Failed` where it holds what cannot be copied."""
    try:
        return state.model_copy(deep=True)
    except Exception as error:
        message = f"the state `reset` gave cannot be copied ({error}); keep handles in `shared`, not in the state"
        raise Failed(message, kind="bad_answer") from error


def _revalidate(answer: M, hook: str) -> M:
    """Return *answer* validated once more: `model_construct` and `model_copy` make models that nothing has checked."""
    kind = type(answer)
    try:
        return kind.model_validate(vars(answer))
    except ValidationError as error:
        message = f"hook {hook!r} answered a {kind.__name__} that is not valid: {errors.format_validation_error(error)}"
        raise Failed(message, kind="bad_answer") from error


def check_reset(answer: Any) -> Reset:
    """Return what `reset` answered; raises `Failed`."""
    return _revalidate(check_type(answer, Reset, "reset"), "reset")


def check_step(answer: Any, action: Action) -> Step:
    """Return what `step` answered to *action*; raises `Failed`."""
    taken = _revalidate(check_type(answer, Step, "step"), "step")
    if not math.isfinite(taken.reward):
        raise Failed(f"hook 'step' paid {taken.reward}, which is no finite reward", kind="bad_answer")
    if taken.output is not None and isinstance(action, Message):
        raise Failed("hook 'step' answered a reply with an output; answer it with messages", kind="bad_answer")
    return taken


def check_verdict(answer: Any) -> Verdict:
    """Return what `verify` answered.

    The verdict is complete, its reward is finite, and JSON can hold its fields, so that every face can report it.

    Raises:
        Unscorable: The reward is not finite.
        Failed: The answer is wrong in any other way.
    """
    given = check_type(answer, Verdict, "verify")
    _check_verdict_base(given)
    if not math.isfinite(given.reward):
        raise Unscorable(f"the verdict's reward is {given.reward}", kind="not_finite")
    if STEPS_COMPONENT in given.components:
        raise Failed(
            f"the component {STEPS_COMPONENT!r} is what the steps paid; name the verdict's otherwise", kind="bad_answer"
        )
    total = sum(given.components.values())
    if given.components and not math.isclose(total, given.reward, abs_tol=1e-6):
        message = f"the verdict's components sum to {total:g}, its reward is {given.reward:g}"
        raise Failed(message, kind="bad_answer")
    _check_verdict_fields(given)
    return given


def _check_verdict_base(given: Verdict) -> None:
    """Check the fields that every verdict has.

    The author's own fields are not validated again: a validator of the author's need not accept its own result.
    """
    base = {name: getattr(given, name) for name in Verdict.model_fields if hasattr(given, name)}
    try:
        Verdict.model_validate(base, strict=True)
    except ValidationError as error:
        message = f"hook 'verify' answered a verdict that is not valid: {errors.format_validation_error(error)}"
        raise Failed(message, kind="bad_answer") from error


def _check_verdict_fields(given: Verdict) -> None:
    """Check that the verdict's fields can stand on a rollout's line."""
    name = type(given).__name__
    try:
        fields = given.model_dump(mode="json", exclude={"reward", "components"}, warnings=False)
        jsonl.dump_portable_json(fields)
    except Exception as error:  # a serialiser of the author's may raise anything
        message = f"the verdict ({name}) cannot be written as JSON: {error}; give its fields values that JSON can hold"
        raise Failed(message, kind="bad_answer") from error
    if taken := sorted(fields.keys() & ROLLOUT_FIELDS):
        message = f"the verdict ({name}) has a field {taken[0]!r}, which a rollout's line has already; rename the field"
        raise Failed(message, kind="bad_answer")


def add_rewards(paid: float, reward: float, stage: str) -> float:
    """Return the sum of two finite rewards; raises `Failed` at *stage* if the sum is not finite."""
    if math.isfinite(added := paid + reward):
        return added
    message = f"the episode's rewards add up to {added}: {reward:g} after {paid:g}; pay rewards whose sum is finite"
    raise Failed(message, kind="not_finite", stage=stage)


def check_solution(answer: Any) -> list[Action] | None:
    """Give the turn `solve` answered, `None` where it does not say; raises `Failed`."""
    if answer is None or isinstance(answer, Message):
        return None if answer is None else [answer]
    if isinstance(answer, ToolCall) or not isinstance(answer, Iterable):
        raise Failed(f"hook 'solve' answered {type(answer).__name__}, not Message or list[ToolCall]", kind="bad_answer")
    return [check_type(call, ToolCall, "solve") for call in answer]


def check_metrics(answer: Any) -> dict[str, float]:
    """Return the figures `metrics` answered; raises `Failed`."""
    given = {} if answer is None else check_type(answer, dict, "metrics")
    return {str(name): _check_metric(name, value) for name, value in given.items()}


def _check_metric(name: object, value: object) -> float:
    if not isinstance(value, Real):
        raise Failed(f"hook 'metrics' answered {value!r} for {name!r}, which is no number", kind="bad_answer")
    try:
        return float(value)
    except OverflowError:
        message = f"hook 'metrics' answered a number for {name!r} that is too large for a figure"
        raise Failed(message, kind="bad_answer") from None


MAX_EXCERPT_CHARS = 500
"""Characters shown of an error that is no `Exception`."""

traceback_log = logging.getLogger("gymsdk.tracebacks")
"""Tracebacks of an author's code, which nothing shows unless a command is asked to."""
traceback_log.propagate = False


class HookRunner:
    """Runs the functions of environment *name*: coroutines on the loop, the rest in its own bounded threads."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.threads = ThreadPool()

    async def run(self, what: str, function: Callable[..., Any], given: dict[str, Any]) -> Any:
        """Give what *function* answers; *what* is its kind and name, as in `hook 'verify'`.

        Raises `Failed` where it raises, or does not answer by the stage's deadline; `EpisodeError` passes.
        """
        deadline = deadlines.get_deadline()
        try:
            with profiling.count_call(self.name, what) as account:
                return await self._answer(what, function, given, deadline, account)
        except (EpisodeError, asyncio.CancelledError, KeyboardInterrupt):
            raise
        except BaseException as error:  # the panic of a Rust extension is no `Exception`
            raise self._told(
                what, function, _get_first_error(error), late=not deadline.get_remaining_seconds()
            ) from error

    async def _answer(
        self,
        what: str,
        function: Callable[..., Any],
        given: dict[str, Any],
        deadline: Deadline,
        account: profiling.CpuCounter | None,
    ) -> Any:
        if not deadline.get_remaining_seconds():
            raise TimeoutError
        if inspect.iscoroutinefunction(function):
            answer = function(**given)
        else:
            # Around the whole: with every thread taken, the wait for one counts as well.
            async with asyncio.timeout_at(deadline.at):
                call = partial(_call_in_thread, function, given)
                answer = await self.threads.run(call if account is None else account.measure(call))
        if not inspect.isawaitable(answer):
            return answer
        awaited = _await_answer(answer)
        try:
            running = awaited if account is None else profiling.ProfiledCoroutine(awaited, account)
            name = f"{what} of environment {self.name!r}"
            return await run_until_deadline(warn_when_blocking(running, name), deadline, name=name)
        finally:
            _close_unstarted(awaited, answer)

    def _told(self, what: str, function: Callable[..., Any], error: BaseException, *, late: bool) -> EpisodeError:
        if isinstance(error, EpisodeError):
            return error
        kind, where = what.split(maxsplit=1)[0], f"{what} of environment {self.name!r}"
        if isinstance(error, TimeoutError) and late:
            return Failed(f"{where} did not answer by its deadline", kind=f"{kind}_timeout", retryable=True)
        traceback_log.debug("%s raised:", where, exc_info=error)
        return Failed(f"{where} raised {describe_exception(error, function)}", kind=f"{kind}_raised", retryable=True)


def _call_in_thread(function: Callable[..., Any], given: dict[str, Any]) -> Any:
    """Call *function*; an error that would end the host or pass for a cancellation becomes a `RuntimeError`."""
    try:
        return function(**given)
    except Exception:
        raise
    except BaseException as error:
        raise RuntimeError(f"it ended with {repr(error)[:MAX_EXCERPT_CHARS]}") from error


async def _await_answer(answer: Awaitable[Any]) -> Any:
    return await answer


def _close_unstarted(*coroutines: object) -> None:
    """End those of *coroutines* that never began, as where the deadline had passed before: Python warns of them."""
    for each in coroutines:
        if inspect.iscoroutine(each) and inspect.getcoroutinestate(each) == inspect.CORO_CREATED:
            each.close()


def _get_first_error(error: BaseException) -> BaseException:
    """Give what a task group brought up first, any other error as it is."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


@asynccontextmanager
async def run_stage(name: str, deadline: Deadline) -> AsyncIterator[None]:
    """Bound what runs inside to *deadline*, and say of an error in which stage it came and how it counts."""
    with deadlines.apply_deadline(deadline):
        try:
            yield
        except EpisodeError as error:
            raise _classify_error(error, name) from error.__cause__


def _classify_error(error: EpisodeError, stage: str) -> EpisodeError:
    """A model's failure leaves a verdict open but breaks any other stage; nothing is unscorable before it is judged."""
    error.stage = stage
    if stage == "verify" and isinstance(error, Failed) and error.kind.startswith("model_"):
        return convert_error(error, Unscorable, message=f"the judge failed: {error}", kind="judge_failed")
    if stage != "verify" and isinstance(error, Unscorable):
        return convert_error(error, Failed)
    return error


LIFESPAN_SECONDS = 600.0
"""Seconds a `lifespan` may take to begin, and to end."""

CANCEL_GRACE_SECONDS = 1.0
"""Seconds that a cancelled `lifespan` has to clean up before it is left behind."""

log = logging.getLogger("gymsdk")


class Lifespan:
    """The lifespan of environment *name*: *asked* gives it anew each time, and is `None` where there is none.

    One task enters the context manager, holds it open and leaves it, whichever tasks call `begin` and `end`: anyio's
    cancel scopes, and so the clients built on them, must be left in the task that entered them. What the context
    manager yielded is *shared*.
    """

    def __init__(self, name: str, asked: Callable[[], AbstractAsyncContextManager[Any] | None] | None) -> None:
        self._where = f"environment {name!r}"
        self._asked = asked
        self._entered = 0
        self._turn = asyncio.Lock()
        self._holder: asyncio.Task[None] | None = None
        self._over = asyncio.Event()
        self.shared: Any = None

    def check_entered(self) -> None:
        """Raise `UsageError` if the lifespan has not begun, `Failed` if it ended by itself."""
        if not self._asked:
            return
        if not self._entered:
            raise UsageError(f"{self._where} has a lifespan; play it inside `async with environment:`")
        if self._holder is not None and self._holder.done():
            message = f"{self._where}: what hook 'lifespan' opened has ended, and the log says why; start the run again"
            raise Failed(message, kind="lifespan_ended", stage="reset", retryable=True)

    async def enter(self) -> None:
        """Enter the lifespan if no caller has yet; raises `BrokenEnvironment`."""
        async with self._turn:
            if not self._entered and self._asked:
                await self._open(self._asked)
            self._entered += 1

    async def exit(self) -> None:
        """Leave the lifespan with the last caller that entered it.

        An error is logged and not raised, since it changes nothing that was graded.
        """
        async with self._turn:
            self._entered -= 1
            if not self._entered:
                await self._close()

    async def _open(self, asked: Callable[[], AbstractAsyncContextManager[Any] | None]) -> None:
        opened: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._over = over = asyncio.Event()
        self._holder = holder = asyncio.create_task(self._hold(asked, opened, over), name=f"lifespan of {self._where}")
        try:
            async with asyncio.timeout(LIFESPAN_SECONDS):
                self.shared = await opened
        except TimeoutError as error:
            raise self._broken(error) from error
        finally:
            if not opened.done() or opened.cancelled() or opened.exception():
                self._holder = None
                await _cancel_and_wait(holder)

    async def _hold(
        self,
        asked: Callable[[], AbstractAsyncContextManager[Any] | None],
        opened: asyncio.Future[Any],
        over: asyncio.Event,
    ) -> None:
        """Enter the context manager, give what it yields to *opened*, and leave it once it is *over*."""
        try:
            context = asked()
            if context is None:
                opened.set_result(None)
                await over.wait()
                return
            async with context as shared:
                opened.set_result(shared)
                await over.wait()
        except asyncio.CancelledError as error:
            # A background task that the author's code started has failed, and took its task group with it.
            if not opened.done():
                opened.set_exception(self._broken(error))
            elif not (over.is_set() or opened.cancelled()):
                log.warning("%s: what hook 'lifespan' opened was cancelled before its end", self._where)
            raise
        except INTERRUPTS as error:
            if not opened.done():
                opened.set_exception(self._broken(error))
            raise
        except BaseException as error:  # noqa: BLE001  # an author's code may raise anything
            if opened.done():
                log.warning("%s: hook 'lifespan' did not end well: %r", self._where, error)
            else:
                opened.set_exception(error if isinstance(error, GymsdkError) else self._broken(error))

    def _broken(self, error: BaseException) -> BrokenEnvironment:
        broken = BrokenEnvironment(f"{self._where}: hook 'lifespan' raised {describe_exception(error)}")
        broken.__cause__ = error
        return broken

    async def _close(self) -> None:
        self.shared = None
        holder, self._holder = self._holder, None
        if holder is None:
            return
        self._over.set()
        await asyncio.wait({holder}, timeout=LIFESPAN_SECONDS)
        if not holder.done():
            log.warning("%s: hook 'lifespan' did not end within %g s; it is left behind", self._where, LIFESPAN_SECONDS)
            await _cancel_and_wait(holder)


async def _cancel_and_wait(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait({task}, timeout=CANCEL_GRACE_SECONDS)
