"""An author's code at work: every hook and tool runs here, under the deadline of its stage, its errors told apart."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from gymsdk import deadlines, spent
from gymsdk.bounds import bounded, watched
from gymsdk.complaints import raised
from gymsdk.deadlines import Deadline
from gymsdk.errors import EpisodeError, Failed, Unscorable, recast
from gymsdk.workers.threads import Threads

EXCERPT = 500
"""Characters shown of an error that is no `Exception`."""

tracebacks = logging.getLogger("gymsdk.tracebacks")
"""Tracebacks of an author's code, which nothing shows unless a command is asked to."""
tracebacks.propagate = False


class Author:
    """Runs the functions of environment *name*: coroutines on the loop, the rest in its own bounded threads."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.threads = Threads()

    async def run(self, what: str, function: Callable[..., Any], given: dict[str, Any]) -> Any:
        """Give what *function* answers; *what* is its kind and name, as in `hook 'verify'`.

        Raises `Failed` where it raises, or does not answer by the stage's deadline; `EpisodeError` passes.
        """
        deadline = deadlines.current()
        try:
            with spent.asked(self.name, what) as account:
                return await self._answer(what, function, given, deadline, account)
        except (EpisodeError, asyncio.CancelledError, KeyboardInterrupt):
            raise
        except BaseException as error:  # the panic of a Rust extension is no `Exception`
            raise self._told(what, function, _first(error), late=not deadline.get_remaining_seconds()) from error

    async def _answer(
        self,
        what: str,
        function: Callable[..., Any],
        given: dict[str, Any],
        deadline: Deadline,
        account: spent.Account | None,
    ) -> Any:
        if not deadline.get_remaining_seconds():
            raise TimeoutError
        if inspect.iscoroutinefunction(function):
            answer = function(**given)
        else:
            # Around the whole: with every thread taken, the wait for one counts as well.
            async with asyncio.timeout_at(deadline.at):
                call = partial(_call, function, given)
                answer = await self.threads.run(call if account is None else account.measure(call))
        if not inspect.isawaitable(answer):
            return answer
        awaited = _awaited(answer)
        try:
            running = awaited if account is None else spent.Stepped(awaited, account)
            name = f"{what} of environment {self.name!r}"
            return await bounded(watched(running, name), deadline, name=name)
        finally:
            _drop(awaited, answer)

    def _told(self, what: str, function: Callable[..., Any], error: BaseException, *, late: bool) -> EpisodeError:
        if isinstance(error, EpisodeError):
            return error
        kind, where = what.split(maxsplit=1)[0], f"{what} of environment {self.name!r}"
        if isinstance(error, TimeoutError) and late:
            return Failed(f"{where} did not answer by its deadline", kind=f"{kind}_timeout", retryable=True)
        tracebacks.debug("%s raised:", where, exc_info=error)
        return Failed(f"{where} raised {raised(error, function)}", kind=f"{kind}_raised", retryable=True)


def _call(function: Callable[..., Any], given: dict[str, Any]) -> Any:
    """Call *function*; an error that would end the host or pass for a cancellation becomes a `RuntimeError`."""
    try:
        return function(**given)
    except Exception:
        raise
    except BaseException as error:
        raise RuntimeError(f"it ended with {repr(error)[:EXCERPT]}") from error


async def _awaited(answer: Awaitable[Any]) -> Any:
    return await answer


def _drop(*coroutines: object) -> None:
    """End those of *coroutines* that never began, as where the deadline had passed before: Python warns of them."""
    for each in coroutines:
        if inspect.iscoroutine(each) and inspect.getcoroutinestate(each) == inspect.CORO_CREATED:
            each.close()


def _first(error: BaseException) -> BaseException:
    """Give what a task group brought up first, any other error as it is."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


@asynccontextmanager
async def stage(name: str, deadline: Deadline) -> AsyncIterator[None]:
    """Bound what runs inside to *deadline*, and say of an error in which stage it came and how it counts."""
    with deadlines.until(deadline):
        try:
            yield
        except EpisodeError as error:
            raise _counted(error, name) from error.__cause__


def _counted(error: EpisodeError, stage: str) -> EpisodeError:
    """A model's failure leaves a verdict open but breaks any other stage; nothing is unscorable before it is judged."""
    error.stage = stage
    if stage == "verify" and isinstance(error, Failed) and error.kind.startswith("model_"):
        return recast(error, Unscorable, message=f"the judge failed: {error}", kind="judge_failed")
    if stage != "verify" and isinstance(error, Unscorable):
        return recast(error, Failed)
    return error
