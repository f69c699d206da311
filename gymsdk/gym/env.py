"""An environment as a `gymnasium.Env`: `reset` opens an episode, and each `step` applies one turn of the policy."""

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

from gymsdk.environment import Environment
from gymsdk.errors import UsageError
from gymsdk.gym import slot
from gymsdk.gym.config import EnvConfig, EpisodeStart, Tasks, build_budget, merge_settings
from gymsdk.gym.slot import Info, Slot, StepResult
from gymsdk.tokens.tokenizer import Tokenizer
from gymsdk.types import Episode, Item, Rollout, extract_text


class TranscriptPrinter:
    """Prints episodes, each item once; *mark* is put before each line to tell slots apart."""

    def __init__(self, mark: str = "") -> None:
        self._mark = mark
        self._episode: Episode | None = None
        self._shown = 0

    def format(self, episode: Episode | None, rollout: Rollout | None = None) -> str:
        """Return *episode* as text, with its outcome if *rollout* is given."""
        return "\n".join(_format_lines(episode, rollout))

    def print_new(self, episode: Episode | None, rollout: Rollout | None = None) -> None:
        """Print the items of *episode* that are new since the last call."""
        shown = self._shown if episode is self._episode else 0
        lines = _format_lines(episode, rollout)
        if lines[shown:]:
            print("\n".join(self._mark + line for line in lines[shown:]), flush=True)  # noqa: T201  # printing is its purpose
        self._episode, self._shown = episode, len(lines)


def _format_lines(episode: Episode | None, rollout: Rollout | None) -> list[str]:
    items = [*episode.transcript.opening, *episode.transcript.items] if episode else []
    return [*map(_format_item, items), *_format_end(rollout)]


def _format_item(item: Item) -> str:
    kind = item.get("type", "message")
    if kind == "function_call":
        return f"call: {item.get('name')} {item.get('arguments') or '{}'}"
    if kind == "function_call_output":
        return f"output: {_format_content(item.get('output'))}"
    if kind == "reasoning":
        return f"reasoning: {_format_content(item.get('summary') or item.get('content'))}"
    return f"{item.get('role', kind)}: {_format_content(item.get('content'))}"


def _format_content(content: str | list[Item] | None) -> str:
    """Return the text of *content*; other parts appear as their type in brackets."""
    if not isinstance(content, list):
        return extract_text(content)
    return "".join(extract_text([part]) if "text" in part else f"[{part.get('type')}]" for part in content)


def _format_end(rollout: Rollout | None) -> Iterator[str]:
    if rollout is None:
        return
    if rollout.failure:
        yield f"{rollout.outcome} in {rollout.failure.stage}: {rollout.failure.message}"
    else:
        yield f"reward: {rollout.reward:g} (ended: {rollout.ended})"


class ExclusiveLock:
    """Lets one thread at a time use an environment."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._process, self._lock = os.getpid(), threading.Lock()

    @contextmanager
    def hold(self, rebuild: Callable[[], None]) -> Iterator[None]:
        """Hold the lock inside the block.

        Args:
            rebuild: Called first in a forked process, which must not use what its parent set up.

        Raises:
            UsageError: Another thread holds the lock.
        """
        if self._process != os.getpid():
            # The thread that held the lock in the parent does not exist in this process.
            self._begin()
            rebuild()
        if not self._lock.acquire(blocking=False):
            raise UsageError("another thread is using this environment; create one environment per thread")
        try:
            yield
        finally:
            self._lock.release()


Ts = TypeVarTuple("Ts")

_finalizers: set[weakref.finalize[Any, Any]] = set()


def close_on_finalize(owner: object, close: Callable[[*Ts], Coroutine[Any, Any, None]], *arguments: *Ts) -> None:
    """Run `close(*arguments)` on the background loop when *owner* is garbage-collected or this process exits.

    The *arguments* must not refer to the owner.
    """

    def end() -> None:
        _finalizers.discard(finalizer)
        # A forked process must not close what its parent still uses.
        if process == os.getpid():
            slot.run_detached(close(*arguments))

    process = os.getpid()
    finalizer = weakref.finalize(owner, end)
    # At exit, `_close_all` closes all environments at once, within one deadline.
    finalizer.atexit = False
    _finalizers.add(finalizer)


@atexit.register
def _close_all() -> None:
    for finalizer in tuple(_finalizers):
        # `detach` returns `None` if the finalizer has run.
        if alive := finalizer.detach():
            alive[1]()
    slot.shut_down()


def is_last_step(env: gymnasium.Env[Any, Any]) -> bool:
    """Return whether a `TimeLimit` wrapper around *env* truncates the episode after the step that is in progress.

    The wrapper truncates after the environment has returned, and does not inform the environment: the last step would
    have no verdict. This function therefore searches the callers of the step for the wrapper.
    """
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001  # the only access to the callers
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, TimeLimit) and caller.unwrapped is env and _truncates_next_step(caller):
            return True
        frame = frame.f_back
    return False


def _truncates_next_step(wrapper: TimeLimit[Any, Any]) -> bool:
    # Gymnasium has no public name for the count. It is `None` before the wrapper's first reset.
    steps: int | None = getattr(wrapper, "_elapsed_steps", None)
    return (steps or 0) + 1 >= wrapper._max_episode_steps  # noqa: SLF001


class Env(gymnasium.Env[Any, Any]):
    """Plays one episode after another of an environment.

    Args:
        environment: The name of an installed environment, or an `Environment`.
        split: The split that the tasks come from; `train` by default, if the environment has it.
        tasks: The tasks to play instead of a split: the path of a JSONL file, or rows.
        codec: The form of observations and actions: `chat` messages, `text`, or `tokens`.
        tokenizer: The tokenizer of the codec `tokens`, or its name.
        turns: The most turns of an episode.
        tools: The most tool calls of an episode.
        seconds: The time limit of each `reset` and each `step`.
        render_mode: `ansi`, `human` or `None`.
        settings: Settings of the environment.
        **config: Further settings of the environment.

    Raises:
        UsageError: An argument is invalid. A failure inside an episode does not raise: the `info` holds it.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["ansi", "human"], "render_fps": 1}  # type: ignore[misc]  # Gymnasium annotates it as an instance attribute

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
            raise UsageError(f"render_mode must be 'ansi', 'human' or None, got {render_mode!r}")
        self.render_mode = render_mode
        self._arguments: dict[str, Any] = {
            "environment": environment,
            "codec": codec,
            "tokenizer": tokenizer,
            "turns": turns,
            "tools": tools,
            "seconds": seconds,
            "render_mode": render_mode,
            "settings": merge_settings(settings, config),
        }
        env_config = EnvConfig(
            environment,
            settings=self._arguments["settings"],
            split=split,
            tasks=tasks,
            codec=codec,
            tokenizer=tokenizer,
            budget=build_budget(turns=turns, tools=tools, seconds=seconds),
        )
        self._lock = ExclusiveLock()
        self._set_up(env_config)
        self.observation_space = self._slot.codec.observation_space
        self.action_space = self._slot.codec.action_space
        self._printer = TranscriptPrinter()

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[Any, Info]:
        """Open an episode.

        Args:
            seed: Determines the task and the episode. Without a seed, the environment's generator draws them.
            options: `task` selects a task by its row, its index or its ID; `split` selects another split.

        Returns:
            The first observation, and an `info` with the `tools` in the form of Chat Completions, the `seed` and the
            `task_id`.

        Raises:
            UsageError: The options are invalid.
        """
        with self._lock.hold(self._rebuild_after_fork):
            super().reset(seed=seed)
            start = self._config.choose_episode(self.np_random, seed=seed, options=options)
            observation, info = slot.run(_open_episode(self._slot, self._config, start))
            self._show()
            return observation, info

    def step(self, action: Any) -> StepResult:
        """Apply one turn of the policy.

        The last step that a `TimeLimit` wrapper allows ends the episode in the same way as an exhausted turn budget.

        Returns:
            Observation, reward, terminated, truncated and `info`. At the end of the episode, `info` holds `outcome`,
            `ended`, `verdict` and `reward_components`. If the episode cannot be scored, it is truncated, the reward is
            NaN, and `info` holds the `failure`.

        Raises:
            ResetNeeded: No episode is open.
            UsageError: The *action* is invalid. The episode continues.
        """
        with self._lock.hold(self._rebuild_after_fork):
            items = self._slot.parse_action(action)
            result = slot.run(self._slot.apply_action(items, last=is_last_step(self)))
            self._show()
            return result

    def render(self) -> str | None:
        """Return the episode so far as text if `render_mode` is `ansi`; `human` prints it during the steps."""
        return self._printer.format(self.episode, self.rollout) if self.render_mode == "ansi" else None

    def close(self) -> None:
        """Close the open episode and leave the environment; the next `reset` enters the environment again."""
        with self._lock.hold(self._rebuild_after_fork):
            slot.run(_close_slot(self._slot, self._config))

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how to create the environment again: a copy has no episode, and a generator in the same state."""
        if isinstance(self._arguments["environment"], Environment):
            raise UsageError("an Env created from an Environment object cannot be copied; use an environment's name")
        if self._slot.is_playing:
            raise UsageError("an Env with an open episode cannot be copied; call close() first")
        drawn = ("action_space", "observation_space", "_np_random", "_np_random_seed")
        kept = {"spec": self.spec} | {key: deepcopy(getattr(self, key)) for key in drawn}
        return partial(type(self), **self._arguments, **self._config.sampler.origin), (), kept

    @property
    def episode(self) -> Episode | None:
        """The open episode, or the last one."""
        return self._slot.episode

    @property
    def rollout(self) -> Rollout | None:
        """The rollout of the last episode, once the episode is over."""
        return self._slot.rollout

    def _set_up(self, config: EnvConfig) -> None:
        self._config = config
        self._slot = Slot(config.environment, config.codec(), config.budget)
        close_on_finalize(self, _close_slot, self._slot, config)

    def _rebuild_after_fork(self) -> None:
        self._set_up(self._config.rebuild())

    def _show(self) -> None:
        if self.render_mode == "human":
            self._printer.print_new(self.episode, self.rollout)


async def _open_episode(slot: Slot, config: EnvConfig, start: EpisodeStart) -> tuple[Any, Info]:
    await config.enter()
    return await slot.reset(start.task, seed=start.seed, id=start.id)


async def _close_slot(slot: Slot, config: EnvConfig) -> None:
    try:
        await slot.close()
    finally:
        await config.leave()
