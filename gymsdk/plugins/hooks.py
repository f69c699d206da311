"""The hooks of an environment.

A hook is a function decorated with `gymsdk.hookimpl`, `def` or `async def`. Its parameters are any of those in the
specification below, without default values. If it returns `None`, the default implementation runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from contextlib import AbstractAsyncContextManager

    from gymsdk.types import (
        Action,
        Claims,
        Config,
        Message,
        Reset,
        Rollout,
        State,
        Step,
        Task,
        ToolCall,
        Transcript,
        Verdict,
    )

PROJECT = "gymsdk"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def reset(task: Task, seed: int, episode_id: str, config: Config, shared: Any) -> Reset | None:
    """Open an episode.

    Args:
        task: The task.
        seed: The seed for random choices.
        episode_id: The id of the episode.
        config: The environment's settings.
        shared: The value that `lifespan` yielded.

    Returns:
        Messages that follow the row's prompt, the initial state, and the tools to offer.
    """


@hookspec
def step(
    task: Task, state: State, action: Action, transcript: Transcript, episode_id: str, config: Config, shared: Any
) -> Step | None:
    """Respond to one tool call or one reply.

    Args:
        task: The task.
        state: The episode's state; the hook may change it in place.
        action: The tool call or reply.
        transcript: The conversation so far.
        episode_id: The id of the episode.
        config: The environment's settings.
        shared: The value that `lifespan` yielded.

    Returns:
        The output or messages for the policy, the step's reward, and whether the episode is over.
    """


@hookspec
def verify(
    task: Task, state: State, transcript: Transcript, episode_id: str, config: Config, shared: Any
) -> Verdict | None:
    """Judge the finished transcript.

    Args:
        task: The task.
        state: The episode's state.
        transcript: The whole conversation.
        episode_id: The id of the episode.
        config: The environment's settings.
        shared: The value that `lifespan` yielded.
    """


@hookspec
def close(task: Task, state: State, episode_id: str, shared: Any) -> None:
    """Release what `reset` acquired; called once per reset, even after an error."""


@hookspec
def tools(config: Config) -> list[Callable[..., Any]] | None:
    """Return the functions that a policy may call.

    The host fills their parameters named `state`, `task`, `config` and `shared`.
    """


@hookspec
def tasks(split: str, seed: int, config: Config) -> Iterable[Task] | None:
    """Return the tasks of one split, lazily; annotate *split* with `Literal[...]` to name the splits."""


@hookspec
def solve(task: Task, state: State, transcript: Transcript, episode_id: str) -> Message | list[ToolCall] | None:
    """Return the next turn of a perfect policy."""


@hookspec
def claims(task: Task) -> Claims | None:
    """Return properties of the task that `gymsdk check` verifies: maximum reward, chance level, other right answers."""


@hookspec
def metrics(rollouts: Sequence[Rollout]) -> dict[str, float] | None:
    """Return the environment's own metrics over scored rollouts; they are merged into the aggregate."""


@hookspec
def lifespan(config: Config) -> AbstractAsyncContextManager[Any] | None:
    """Return a context manager that is entered once per process; all episodes share the value that it yields."""
