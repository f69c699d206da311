"""The Gymnasium interface: `gymnasium.make("nemo/<name>")`, `gymnasium.make_vec`, and policies that play them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gymsdk.gym.env import Env
    from gymsdk.gym.policy import Policy, rollout
    from gymsdk.gym.registration import register
    from gymsdk.gym.spaces import Turn
    from gymsdk.gym.vector import VectorEnv

__all__ = ["Env", "Policy", "Turn", "VectorEnv", "register", "rollout"]

_HOMES = {
    "Env": "env",
    "Policy": "policy",
    "Turn": "spaces",
    "VectorEnv": "vector",
    "register": "registration",
    "rollout": "policy",
}


def __getattr__(name: str) -> Any:
    # Gymnasium calls `register` while it is being imported: this module must not import Gymnasium itself.
    if name not in _HOMES:
        raise AttributeError(f"module 'gymsdk.gym' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"gymsdk.gym.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
