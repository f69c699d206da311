"""The entries of Gymnasium's registry: every installed environment as `nemo/<name>`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gymsdk.plugins.registry import installed

if TYPE_CHECKING:
    from gymnasium.envs.registration import EnvSpec

NAMESPACE = "nemo"
"""What stands before the name in an environment's id."""


def register() -> list[str]:
    """Give the ids of the installed environments, all of them now in Gymnasium's registry.

    An id that is there already, in whatever version, is left as it is.
    """
    from gymnasium.envs.registration import registry

    taken = {spec.name for spec in tuple(registry.values()) if spec.namespace == NAMESPACE}
    specs = [spec for name in installed() if (spec := _spec(name))]
    # Not by Gymnasium's `register`: inside somebody's `with namespace("other")` that would register as `other/<name>`.
    registry.update({spec.id: spec for spec in specs if spec.name not in taken})
    return [spec.id for spec in specs]


def _spec(name: str) -> EnvSpec | None:
    """Give the entry of environment *name*, `None` where Gymnasium's ids cannot hold that name."""
    from gymnasium.envs.registration import EnvSpec
    from gymnasium.error import Error

    try:
        spec = EnvSpec(
            id=f"{NAMESPACE}/{name}",
            entry_point="gymsdk.gym:Env",
            vector_entry_point="gymsdk.gym:VectorEnv",
            kwargs={"environment": name},
            disable_env_checker=True,  # it warns of a reward of `nan`, by which a failed episode says so
        )
    except Error:
        return None
    # Of `name-v2` Gymnasium reads a version, of `one:two` a module to import.
    return spec if spec.name == name and ":" not in name else None
