"""Slots play one episode at a time, all of them on one background event loop of the process."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Coroutine, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from math import nan
from typing import Any, Generic, TypeVar

import numpy as np
from gymnasium.error import ResetNeeded
from gymnasium.utils import seeding

from gymsdk.convert import chat
from gymsdk.environment import Environment
from gymsdk.episode import EpisodeRunner
from gymsdk.errors import EpisodeError, Failed, UsageError
from gymsdk.gym import spaces
from gymsdk.gym.codecs import Codec
from gymsdk.gym.config import EnvConfig, EpisodeStart
from gymsdk.gym.spaces import PARSE_ERRORS
from gymsdk.jsonl import copy_json
from gymsdk.types import Budget, Episode, Item, Rollout, Task

T = TypeVar("T")

SHUTDOWN_SECONDS = 15.0
"""Seconds that an interrupted call, or all remaining work at exit, may take to end."""

SIGNAL_CHECK_SECONDS = 1.0
"""Seconds after which a waiting thread looks for signals. CPython notices a signal that arrives just before a thread
starts to wait only when the wait ends."""

log = logging.getLogger("gymsdk")

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
_detached: set[_Job[Any]] = set()
_abandoned: list[object] = []
_is_shut_down = False


class _Job(Generic[T]):
    """A coroutine that another thread submits to the background loop."""

    def __init__(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self._coroutine = coroutine
        self._task: asyncio.Task[T] | None = None
        self.done = threading.Event()

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._coroutine)
        self._task.add_done_callback(self._end)

    def cancel(self) -> None:
        if self._task:
            self._task.cancel()

    def _end(self, task: asyncio.Task[T]) -> None:
        _detached.discard(self)
        # At exit, only daemon threads still wait: they would print a traceback of the cancellation.
        if not (_is_shut_down and task.cancelled()):
            self.done.set()

    def result(self) -> T:
        assert self._task is not None, "a job that is done has been started"
        return self._task.result()


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run *coroutine* on the background loop from any thread and return its result.

    Raises:
        UsageError: The caller runs on the background loop itself.
    """
    loop = _get_loop()
    if _is_running_loop(loop):
        # Otherwise Python warns that the coroutine was never awaited.
        coroutine.close()
        raise UsageError(
            "a Gymnasium environment cannot be used inside a hook or a model on its own event loop; use `gymsdk.play`"
        )
    job = _Job(coroutine)
    try:
        loop.call_soon_threadsafe(job.start)
        while not job.done.wait(SIGNAL_CHECK_SECONDS):
            pass
    except BaseException:
        # After Ctrl-C, no half-played episode must continue in the background.
        loop.call_soon_threadsafe(job.cancel)
        job.done.wait(SHUTDOWN_SECONDS)
        raise
    return job.result()


def run_detached(coroutine: Coroutine[Any, Any, None]) -> None:
    """Start *coroutine* on the background loop and return at once; safe to call from a finalizer in any thread."""
    # Without the lock, which the interrupted thread may hold.
    if _loop is None:
        coroutine.close()
        return
    job = _Job(_log_errors(coroutine))
    _detached.add(job)
    _loop.call_soon_threadsafe(job.start)


def wait_for_detached() -> None:
    """Wait up to `SHUTDOWN_SECONDS` for the detached coroutines, and cancel the rest."""
    deadline = time.monotonic() + SHUTDOWN_SECONDS
    for job in tuple(_detached):
        if not job.done.wait(max(0.0, deadline - time.monotonic())) and _loop:
            _loop.call_soon_threadsafe(job.cancel)
            job.done.wait(1.0)


def shut_down() -> None:
    """Wait for the detached coroutines and cancel everything else on the loop; called when the interpreter exits."""
    global _is_shut_down  # noqa: PLW0603  # there is one per process
    wait_for_detached()
    if _loop:
        _is_shut_down = True
        cancelled = asyncio.run_coroutine_threadsafe(_cancel_all_tasks(), _loop)
        with suppress(TimeoutError):
            cancelled.result(SHUTDOWN_SECONDS)


async def _cancel_all_tasks() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=SHUTDOWN_SECONDS / 2)
    await asyncio.get_running_loop().shutdown_asyncgens()


async def _log_errors(coroutine: Coroutine[Any, Any, None]) -> None:
    try:
        await coroutine
    except Exception as error:  # noqa: BLE001  # no caller awaits the result
        log.warning("an environment that was left open could not be closed: %r", error)


def _is_running_loop(loop: asyncio.AbstractEventLoop) -> bool:
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False


def _get_loop() -> asyncio.AbstractEventLoop:
    global _loop  # noqa: PLW0603  # there is one per process
    with _lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_run_loop, args=(_loop,), name="gymsdk-gym", daemon=True).start()
        return _loop


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    while not loop.is_closed():
        try:
            loop.run_forever()
        except BaseException as error:  # noqa: BLE001  # the task has the exception, for its caller
            log.warning("code of an environment raised %r on the event loop that it shares with others", error)


def _reset_after_fork() -> None:
    global _lock, _loop
    # The loop's thread exists only in the parent, and may have held the lock. Closing the loop here would remove its
    # wake-up pipe from the selector, which the parent still uses.
    _abandoned.extend((_loop, *_detached))
    for task in asyncio.all_tasks(_loop) if _loop else ():
        # The task continues in the parent: asyncio must not report it as destroyed here.
        task._log_destroy_pending = False  # type: ignore[attr-defined]  # noqa: SLF001  # asyncio's own way to say so
    _detached.clear()
    _lock, _loop = threading.Lock(), None


os.register_at_fork(after_in_child=_reset_after_fork)


Info = dict[str, Any]

StepResult = tuple[Any, float, bool, bool, Info]
"""Observation, reward, terminated, truncated and info."""

UNENCODABLE = "unspeakable"
"""The failure kind of an episode whose environment sent something that the codec cannot express."""


class Slot:
    """Plays one episode after another for one policy.

    The budget's turns and tool calls limit an episode. Its seconds limit each `reset` and each `step`: the time that an
    external policy takes for its turn does not count. An episode that cannot be scored ends truncated, with the reward
    NaN and `info["failure"]`; so does an episode whose messages the codec cannot express. An episode that cannot be
    opened ends in this way at its first step.
    """

    def __init__(self, environment: Environment, codec: Codec, budget: Budget) -> None:
        self.environment = environment
        self.codec = codec
        self.rollout: Rollout | None = None
        self._budget = budget
        self._runner: EpisodeRunner | None = None
        self._turn = 0
        self._closed = True

    @property
    def episode(self) -> Episode | None:
        """The open episode, or the last one; `None` before a reset and after `close`."""
        return self._runner.episode if self._runner else None

    @property
    def is_playing(self) -> bool:
        """Whether an episode is open."""
        return self._runner is not None and self.rollout is None

    async def open(self, task: Task, *, seed: int, id: str = "") -> Any:
        """Close the previous episode, open one of *task* and return the first observation."""
        await self.close()
        self._runner = runner = EpisodeRunner(self.environment, self._budget)
        self._turn, self._closed, self.rollout = 0, False, None
        try:
            return await self._open(runner, task, seed, id)
        except EpisodeError as error:
            return self._fail_open(runner, error)
        except BaseException:
            await self.close()
            raise

    async def reset(self, task: Task, *, seed: int, id: str = "") -> tuple[Any, Info]:
        """Open an episode like `open`; `info` holds the tools, the seed, the task ID, and a failure if there is one."""
        observation = await self.open(task, seed=seed, id=id)
        info: Info = {"tools": [], "seed": seed, "task_id": id}
        runner = self._runner
        if runner is not None and runner.episode is not None and runner.result is None:
            try:
                tools = chat.build_body({"input": [], "tools": runner.episode.tools}).get("tools", [])
                # A copy: the caller may change it, and the episode keeps the original.
                info["tools"] = copy_json(tools)
            except EpisodeError as error:
                observation = self._fail_open(runner, error)
        if runner is not None and runner.result is not None:
            info["failure"] = _dump_failure(runner.build_rollout())
        return observation, info

    def _fail_open(self, runner: EpisodeRunner, error: EpisodeError) -> Any:
        """Record that the episode cannot be opened; return its observation."""
        error.stage = error.stage or "reset"
        runner.result = error
        return self._encode_nothing()

    def parse_action(self, action: Any) -> list[Item]:
        """Parse an *action* into output items; raises `ResetNeeded`, or `UsageError` if the action is invalid."""
        if not self.is_playing:
            raise ResetNeeded("no episode is open; call reset() before step()")
        return self.codec.parse_action(action, turn=self._turn)

    async def apply_action(self, items: list[Item], *, last: bool = False) -> StepResult:
        """Apply a turn that `parse_action` has parsed.

        At the end of the episode, `info` holds the outcome, the reason of the end and the parts of the verdict.

        Args:
            items: The output items of the turn.
            last: Whether the turn ends and scores the episode, as an exhausted turn budget does.
        """
        runner = self._runner
        if runner is None or self.rollout:
            raise ResetNeeded("the episode was closed during the step; call reset() before step()")
        self._turn += 1
        if last:
            runner.limit_turns(self._turn)
        try:
            observation, reward = await self._apply(runner, items)
            if runner.is_over:
                self.rollout = await self._judge(runner)
        except BaseException:
            await self.close()
            raise
        return (
            self._build_final_step(self.rollout, observation, reward)
            if self.rollout
            else (observation, reward, False, False, {})
        )

    async def step(self, action: Any) -> StepResult:
        """Parse and apply one turn."""
        return await self.apply_action(self.parse_action(action))

    async def end(self) -> Rollout:
        """End the open episode without another turn, as an exhausted turn budget does, and score it."""
        runner = self._runner
        if runner is None or runner.episode is None or self.rollout:
            raise ResetNeeded("no episode is open; call reset() before end()")
        runner.episode.transcript.ended = "turns"
        runner.restart_deadline()
        self.rollout = await self._judge(runner)
        return self.rollout

    async def close(self) -> None:
        """Close the open episode."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await self._close_runner(runner)

    async def _open(self, runner: EpisodeRunner, task: Task, seed: int, id: str) -> Any:
        episode = await runner.open(task, seed=seed, id=id)
        runner.pause_deadline()
        with _convert_codec_errors():
            return self.codec.encode_opening(episode.transcript.opening, episode.tools)

    def _encode_nothing(self) -> Any:
        """Return the observation of an episode that cannot be opened: an empty prompt if the codec can express it."""
        try:
            with _convert_codec_errors():
                return self.codec.encode_opening([], [])
        except Failed:
            return self.codec.encode_reply([], over=True)

    async def _apply(self, runner: EpisodeRunner, items: list[Item]) -> tuple[Any, float]:
        """Apply the turn; return the next observation and the turn's reward. After a failure the episode is over."""
        # An episode that could not be opened ends at its first step.
        if runner.is_over:
            return self.codec.encode_reply([], over=True), nan
        runner.restart_deadline()
        try:
            applied = await runner.apply_response(spaces.build_response(items))
            with _convert_codec_errors():
                return self.codec.encode_reply(applied.items, over=runner.is_over), applied.reward
        except EpisodeError as error:
            error.stage = error.stage or "step"
            runner.result = error
            return self.codec.encode_reply([], over=True), nan
        finally:
            # The deadline must not run while other slots still play.
            runner.pause_deadline()

    async def _judge(self, runner: EpisodeRunner) -> Rollout:
        try:
            if runner.result is None:
                await runner.verify()
        except EpisodeError as error:
            runner.result = error
        await self._close_runner(runner)
        return runner.build_rollout()

    async def _close_runner(self, runner: EpisodeRunner) -> None:
        # Set before the close, so that an interrupted close is not repeated.
        closed, self._closed = self._closed, True
        if not closed:
            await runner.close()

    def _build_final_step(self, rollout: Rollout, observation: Any, reward: float) -> StepResult:
        info: Info = {"outcome": rollout.outcome, "ended": rollout.ended}
        if rollout.verdict is None:
            return observation, nan, False, True, info | {"failure": _dump_failure(rollout)}
        info |= {"verdict": rollout.verdict.model_dump(mode="json"), "reward_components": dict(rollout.components)}
        done = rollout.ended == "done"
        return observation, reward + rollout.verdict.reward, done, not done, info


@contextmanager
def _convert_codec_errors() -> Iterator[None]:
    """Turn what the codec cannot express into a failure of this episode alone."""
    try:
        yield
    except UsageError as error:
        raise Failed(str(error), kind=UNENCODABLE) from error
    except PARSE_ERRORS as error:
        advice = "a message has a `role`, and a `content` that is text or a list of parts"
        raise Failed(f"a message from the environment cannot be read; {advice}", kind=UNENCODABLE) from error


def _dump_failure(rollout: Rollout) -> Item | None:
    return rollout.failure.model_dump() if rollout.failure else None


RESET_REWARD_AND_FLAGS = 0.0, False, False
"""The reward, `terminated` and `truncated` of a slot that was reset."""


class Slots:
    """The slots of a vector environment.

    `play` and `close` are coroutines for the background loop.

    Args:
        config: The environment and the tasks of the slots.
        generators: One random generator per slot with its seed; `None` for a generator to be created on first use.
    """

    def __init__(self, config: EnvConfig, generators: list[tuple[np.random.Generator, int] | None]) -> None:
        self.config = config
        self.generators = generators
        self.slots = [Slot(config.environment, config.codec(), config.budget) for _ in generators]
        self.finished: list[Rollout | None] = [None] * len(generators)

    def get_generator(self, index: int, seed: int | None = None) -> tuple[np.random.Generator, int]:
        """Return the generator of a slot and its seed; a *seed* replaces the generator."""
        generator = self.generators[index]
        if seed is not None or generator is None:
            generator = self.generators[index] = seeding.np_random(seed)
        return generator

    def choose_episode(
        self, index: int, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> EpisodeStart:
        """Choose the task and the seed of a slot's next episode; raises `UsageError`."""
        return self.config.choose_episode(self.get_generator(index, seed)[0], seed=seed, options=options)

    def find_finished(self) -> list[int]:
        """Return the slots with an ended episode."""
        return [index for index, slot in enumerate(self.slots) if slot.rollout]

    def parse_actions(self, actions: Mapping[int, Any]) -> dict[int, list[Item]]:
        """Parse the action of each slot before any is applied; raises `ResetNeeded`, and `UsageError` for a bad one."""
        if idle := [str(index) for index in actions if not self.slots[index].is_playing]:
            raise ResetNeeded(f"no episode is open in slot {', '.join(idle)}; reset the slot before the next step()")
        return {index: self._parse_action(index, action) for index, action in actions.items()}

    async def open(self, starts: Mapping[int, EpisodeStart]) -> dict[int, Any]:
        """Open the episodes in *starts* concurrently; return the first observation of each slot, without an `info`."""
        await self.config.enter()
        opened = [self.slots[index].open(start.task, seed=start.seed, id=start.id) for index, start in starts.items()]
        return dict(zip(starts, await _gather_all(opened), strict=True))

    async def play(
        self, outputs: Mapping[int, list[Item]], starts: Mapping[int, EpisodeStart]
    ) -> dict[int, StepResult]:
        """Apply the turns *outputs* and open the episodes *starts* concurrently; return the step result by slot."""
        await self.config.enter()
        turns = [self.slots[index].apply_action(items) for index, items in outputs.items()]
        resets = [_reset_slot(self.slots[index], start) for index, start in starts.items()]
        try:
            played = await _gather_all([*turns, *resets])
        finally:
            # Also after an error in one slot: the other slots may have finished.
            for index in outputs:
                self.finished[index] = self.slots[index].rollout or self.finished[index]
        return dict(zip([*outputs, *starts], played, strict=True))

    async def close(self) -> None:
        """Close every open episode and leave the environment."""
        try:
            await _gather_all(slot.close() for slot in self.slots)
        finally:
            await self.config.leave()

    def _parse_action(self, index: int, action: Any) -> list[Item]:
        try:
            return self.slots[index].parse_action(action)
        except UsageError as error:
            raise UsageError(f"slot {index}: {error}") from None


async def _reset_slot(slot: Slot, start: EpisodeStart) -> StepResult:
    observation, info = await slot.reset(start.task, seed=start.seed, id=start.id)
    return observation, *RESET_REWARD_AND_FLAGS, info


async def _gather_all(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Await all *coroutines* to their end, also after an error or a cancellation; then raise the first error."""
    ended = await asyncio.gather(*coroutines, return_exceptions=True)
    results = [result for result in ended if not isinstance(result, BaseException)]
    for result in ended:
        if isinstance(result, BaseException):
            raise result
    return results
