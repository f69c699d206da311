"""An author's code at work: every hook and tool runs here, under the deadline of its stage, its errors told apart."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

from gymsdk.bounds import bounded, watched
from gymsdk.errors import EpisodeError, Failed, Unscorable
from gymsdk.workers.threads import Threads

LONGEST = 600.0
"""Seconds a hook or tool may take where its episode has no deadline."""

_deadline: ContextVar[float | None] = ContextVar("gymsdk_deadline", default=None)


class Author:
    """Runs the functions of environment *name*: coroutines on the loop, the rest in its own bounded threads."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.threads = Threads()

    async def run(self, what: str, function: Callable[..., Any], given: dict[str, Any]) -> Any:
        """Give what *function* answers; *what* is its kind and name, as in `hook 'verify'`.

        Raises `Failed` where it raises, or does not answer by the stage's deadline; `EpisodeError` passes.
        """
        deadline = _deadline.get()
        try:
            return await self._answer(what, function, given, deadline)
        except (EpisodeError, asyncio.CancelledError, KeyboardInterrupt):
            raise
        except BaseException as error:  # the panic of a Rust extension is no `Exception`
            raise self._told(what, _first(error), late=_left(deadline) == 0.0) from error

    async def _answer(
        self, what: str, function: Callable[..., Any], given: dict[str, Any], deadline: float | None
    ) -> Any:
        if inspect.iscoroutinefunction(function):
            answer = function(**given)
        else:
            # Around the whole: with every thread taken, the wait for one counts as well.
            async with asyncio.timeout_at(deadline):
                answer = await self.threads.run(partial(_call, function, given))
        if not inspect.isawaitable(answer):
            return answer
        return await bounded(watched(_awaited(answer), f"{what} of environment {self.name!r}"), deadline)

    def _told(self, what: str, error: BaseException, *, late: bool) -> EpisodeError:
        if isinstance(error, EpisodeError):
            return error
        kind, where = what.split(maxsplit=1)[0], f"{what} of environment {self.name!r}"
        if isinstance(error, TimeoutError) and late:
            return Failed(f"{where} did not answer by its deadline", kind=f"{kind}_timeout", retryable=True)
        return Failed(f"{where} raised {type(error).__name__}: {error}", kind=f"{kind}_raised", retryable=True)


def _call(function: Callable[..., Any], given: dict[str, Any]) -> Any:
    try:
        return function(**given)
    except SystemExit as error:
        raise RuntimeError(f"it ended with {error!r}") from error


async def _awaited(answer: Awaitable[Any]) -> Any:
    return await answer


def _first(error: BaseException) -> BaseException:
    """Give what a task group brought up first, any other error as it is."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


@asynccontextmanager
async def stage(name: str, deadline: float | None) -> AsyncIterator[None]:
    """Bound what runs inside to *deadline*, and say of an error in which stage it came and how it counts."""
    token = _deadline.set(from_now(LONGEST) if deadline is None else deadline)
    try:
        yield
    except EpisodeError as error:
        raise _counted(error, name) from error.__cause__
    finally:
        _deadline.reset(token)


def _counted(error: EpisodeError, stage: str) -> EpisodeError:
    """A model's failure leaves a verdict open but breaks any other stage; nothing is unscorable before it is judged."""
    error.stage = error.stage or stage
    if stage == "verify" and isinstance(error, Failed) and error.kind.startswith("model_"):
        return Unscorable(f"the judge failed: {error}", kind="judge_failed", retryable=error.retryable, stage=stage)
    if stage != "verify" and isinstance(error, Unscorable):
        return Failed(str(error), kind=error.kind, retryable=error.retryable, stage=stage)
    return error


def from_now(seconds: float) -> float:
    """Give the time of the loop's clock *seconds* from now."""
    return asyncio.get_running_loop().time() + seconds


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - asyncio.get_running_loop().time())
