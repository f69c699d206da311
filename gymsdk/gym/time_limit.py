"""Gymnasium's `TimeLimit` wrapper, as the environment inside it knows of it: which step is an episode's last."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import gymnasium
from gymnasium.wrappers import TimeLimit


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
