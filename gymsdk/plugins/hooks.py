"""The hooks of an environment: what each is asked, with what, and what it answers.

A hook is a function decorated with `gymsdk.hookimpl`. It names the parameters it needs, any of those its
specification lists and no other, without default values, and may be `def` or `async def`. Answering `None`
leaves the question to the floor.
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
def reset(task: Task, seed: int, config: Config, shared: Any) -> Reset | None:
    """Open an episode: messages to add to the row's own prompt, the starting state, the tools it offers."""


@hookspec
def step(task: Task, state: State, action: Action, transcript: Transcript, config: Config, shared: Any) -> Step | None:
    """Answer one tool call or one plain reply; *state* may be changed in place."""


@hookspec
def verify(task: Task, state: State, transcript: Transcript, config: Config, shared: Any) -> Verdict | None:
    """Judge the finished transcript."""


@hookspec
def close(task: Task, state: State, shared: Any) -> None:
    """Release what `reset` took; called once per reset, whatever happened."""


@hookspec
def tools(config: Config) -> list[Callable[..., Any]] | None:
    """The functions a policy may call; what they ask for by name (`state`, `task`, `config`, `shared`) is given."""


@hookspec
def tasks(split: str, seed: int, config: Config) -> Iterable[Task] | None:
    """The rows of one split, lazily; annotate *split* with `Literal[...]` to name the splits."""


@hookspec
def solve(task: Task, state: State, transcript: Transcript) -> Message | list[ToolCall] | None:
    """What a perfect policy does next."""


@hookspec
def claims(task: Task) -> Claims | None:
    """What the environment claims of this task: the best reward, what chance earns, other right answers."""


@hookspec
def metrics(rollouts: Sequence[Rollout]) -> dict[str, float] | None:
    """Figures of the environment's own over scored rollouts, merged into the aggregate."""


@hookspec
def lifespan(config: Config) -> AbstractAsyncContextManager[Any] | None:
    """Once per process: what it yields is `shared` by all episodes."""
