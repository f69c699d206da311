"""An environment as a `gymnasium.Env`: every `reset` opens an episode, every `step` takes one turn of a policy."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from types import FrameType
from typing import Any, ClassVar, TypeVarTuple

import gymnasium
from gymnasium.wrappers import TimeLimit

import gymsdk.gym.batch  # noqa: F401  # Gymnasium's own vectors learn there how to batch what an `Env` gives
from gymsdk.environment import Environment
from gymsdk.errors import UsageError
from gymsdk.gym import loop
from gymsdk.gym.config import Dealt, Table, Tasks, budget, merged
from gymsdk.gym.render import Screen
from gymsdk.gym.slot import Info, Seat, Stepped
from gymsdk.tokens.tokenizer import Tokenizer
from gymsdk.types import Episode, Rollout


class Claim:
    """Nobody's at first."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._process, self._lock = os.getpid(), threading.Lock()

    @contextmanager
    def held(self, anew: Callable[[], None]) -> Iterator[None]:
        """Hold it inside the block; in a fork *anew* is called first. Raises `UsageError` where it is held."""
        if self._process != os.getpid():
            # Whoever held it in the parent does not run here.
            self._begin()
            anew()
        if not self._lock.acquire(blocking=False):
            raise UsageError("another thread is using this environment; make one for each thread")
        try:
            yield
        finally:
            self._lock.release()


Ts = TypeVarTuple("Ts")

_open: set[weakref.finalize[Any, Any]] = set()


def unclosed(owner: object, close: Callable[[*Ts], Coroutine[Any, Any, None]], *given: *Ts) -> None:
    """Have `close(*given)` run on the background loop once *owner* is gone or this process ends.

    Nothing that is *given* may hold the owner.
    """

    def end() -> None:
        _open.discard(finalizer)
        if process == os.getpid():
            loop.leave(close(*given))

    process = os.getpid()
    finalizer = weakref.finalize(owner, end)
    # At exit they all close at once, within one bound: `_end` sees to that.
    finalizer.atexit = False
    _open.add(finalizer)


@atexit.register
def _end() -> None:
    for finalizer in tuple(_open):
        # To call one does nothing by now.
        if alive := finalizer.detach():
            alive[1]()
    loop.shut()


def ends_now(env: gymnasium.Env[Any, Any]) -> bool:
    """Return whether a `TimeLimit` around *env* truncates the episode after the step that is being taken.

    The wrapper truncates once the environment has answered and tells the environment nothing, so that the answer to the
    last step would have no verdict. It is found among the callers of this step: there the environment can judge.
    """
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001  # the one way to the callers
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, TimeLimit) and caller.unwrapped is env and _is_last(caller):
            return True
        frame = frame.f_back
    return False


def _is_last(wrapper: TimeLimit[Any, Any]) -> bool:
    # Gymnasium has no other word for it. Before a reset of the wrapper's own it has counted nothing.
    taken: int | None = getattr(wrapper, "_elapsed_steps", None)
    return (taken or 0) + 1 >= wrapper._max_episode_steps  # noqa: SLF001


class Env(gymnasium.Env[Any, Any]):
    """One episode after another of *environment*, an installed one's name or an `Environment`.

    Tasks come from *split* (`train` where there is one) or are given as *tasks*: a JSONL file, or rows. *codec* says
    what is seen and said: `chat` messages, `text`, or `tokens` of *tokenizer*. An episode has at most so many *turns*
    and calls of *tools*; each `reset` and `step` has *seconds*. What else is given, or stands in *settings*, are the
    environment's own settings. Raises `UsageError`; what goes wrong in an episode is in its `info` instead.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["ansi", "human"], "render_fps": 1}  # type: ignore[misc]  # Gymnasium does not say that it is the class's

    def __init__(  # noqa: PLR0913  # each is an argument of `gymnasium.make`
        self,
        environment: str | Environment,
        *,
        split: str | None = None,
        tasks: Tasks | None = None,
        codec: str = "chat",
        tokenizer: Tokenizer | str | None = None,
        turns: int = 32,
        tools: int = 128,
        seconds: float = 600.0,
        render_mode: str | None = None,
        settings: Mapping[str, Any] | None = None,
        **config: Any,
    ) -> None:
        if render_mode not in {None, *self.metadata["render_modes"]}:
            raise UsageError(f"render_mode is 'ansi', 'human' or None, not {render_mode!r}")
        self.render_mode = render_mode
        self._made: dict[str, Any] = {
            "environment": environment,
            "codec": codec,
            "tokenizer": tokenizer,
            "turns": turns,
            "tools": tools,
            "seconds": seconds,
            "render_mode": render_mode,
            "settings": merged(settings, config),
        }
        table = Table(
            environment,
            settings=self._made["settings"],
            split=split,
            tasks=tasks,
            codec=codec,
            tokenizer=tokenizer,
            budget=budget(turns=turns, tools=tools, seconds=seconds),
        )
        self._claim = Claim()
        self._sit(table)
        self.observation_space = self._seat.codec.observation_space
        self.action_space = self._seat.codec.action_space
        self._screen = Screen()

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[Any, Info]:
        """Give a new episode's first observation; `info` has its `tools` as in Chat Completions, `seed`, `task_id`.

        *seed* decides the task and the episode, where it is given; *options* may name the `task` (a row, its number or
        its id) and another `split`. Raises `UsageError`.
        """
        with self._claim.held(self._sit_anew):
            super().reset(seed=seed)
            dealt = self._table.deal(self.np_random, seed=seed, options=options)
            seen, info = loop.run(_opened(self._seat, self._table, dealt))
            self._show()
            return seen, info

    def step(self, action: Any) -> Stepped:
        """Give what comes of one turn: observation, reward, terminated, truncated, `info`.

        The last step that a `TimeLimit` allows, as that of `make(max_episode_steps=)`, ends the episode like a spent
        budget of turns. At the end `info` has `outcome`, `ended`, `verdict` and `reward_components`; where the episode
        could not be scored, its reward is nan, it is truncated, and `info` has the `failure`. Raises `ResetNeeded`
        where no episode is in hand, and `UsageError` where *action* is none: the episode goes on.
        """
        with self._claim.held(self._sit_anew):
            items = self._seat.heard(action)
            stepped = loop.run(self._seat.answer(items, last=ends_now(self)))
            self._show()
            return stepped

    def render(self) -> str | None:
        """Give the episode so far as text where `render_mode` is `ansi`; `human` has shown it already."""
        return self._screen.text(self.episode, self.rollout) if self.render_mode == "ansi" else None

    def close(self) -> None:
        """Close the episode in hand and leave the environment; `reset` enters it again."""
        with self._claim.held(self._sit_anew):
            loop.run(_cleared(self._seat, self._table))

    def __reduce__(self) -> tuple[Any, ...]:
        """Give how to make the environment again: a copy has no episode, and its own generator in the same state."""
        if isinstance(self._made["environment"], Environment):
            raise UsageError("made of an Environment object it cannot be copied; name an installed environment instead")
        if self._seat.playing:
            raise UsageError("while an episode is open it cannot be copied; close() it first")
        drawn = ("action_space", "observation_space", "_np_random", "_np_random_seed")
        kept = {"spec": self.spec} | {key: deepcopy(getattr(self, key)) for key in drawn}
        return partial(type(self), **self._made, **self._table.deck.origin), (), kept

    @property
    def episode(self) -> Episode | None:
        """The episode in hand, or the last one."""
        return self._seat.episode

    @property
    def rollout(self) -> Rollout | None:
        """The last episode's rollout, once it is over."""
        return self._seat.rollout

    def _sit(self, table: Table) -> None:
        self._table = table
        self._seat = Seat(table.environment, table.codec(), table.budget)
        unclosed(self, _cleared, self._seat, table)

    def _sit_anew(self) -> None:
        self._sit(self._table.anew())

    def _show(self) -> None:
        if self.render_mode == "human":
            self._screen.show(self.episode, self.rollout)


async def _opened(seat: Seat, table: Table, dealt: Dealt) -> tuple[Any, Info]:
    await table.enter()
    return await seat.reset(dealt.task, seed=dealt.seed, id=dealt.id)


async def _cleared(seat: Seat, table: Table) -> None:
    try:
        await seat.close()
    finally:
        await table.leave()
