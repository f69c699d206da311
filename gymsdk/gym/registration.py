"""Register every installed environment with Gymnasium as `nemo/<name>`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gymsdk.plugins.registry import installed

if TYPE_CHECKING:
    from gymnasium.envs.registration import EnvSpec

NAMESPACE = "nemo"
"""The namespace of the environments' IDs in Gymnasium."""


def register() -> list[str]:
    """Add the installed environments to Gymnasium's registry.

    An ID that is already registered, in any version, stays unchanged.

    Returns:
        The IDs of the installed environments.
    """
    from gymnasium.envs.registration import registry

    taken = {spec.name for spec in tuple(registry.values()) if spec.namespace == NAMESPACE}
    specs = [spec for name in installed() if (spec := _spec(name))]
    # Not with Gymnasium's `register`: inside `with namespace("other")` it would register `other/<name>`.
    registry.update({spec.id: spec for spec in specs if spec.name not in taken})
    return [spec.id for spec in specs]


def _spec(name: str) -> EnvSpec | None:
    """Return the registry entry of environment *name*, or `None` if Gymnasium's syntax of IDs rules out the name."""
    from gymnasium.envs.registration import EnvSpec
    from gymnasium.error import Error

    try:
        spec = EnvSpec(
            id=f"{NAMESPACE}/{name}",
            entry_point="gymsdk.gym:Env",
            vector_entry_point="gymsdk.gym:VectorEnv",
            kwargs={"environment": name},
            disable_env_checker=True,  # the checker warns about the reward NaN of a failed episode
        )
    except Error:
        return None
    # Gymnasium would read the end of `name-v2` as a version, and the beginning of `one:two` as a module to import.
    return spec if spec.name == name and ":" not in name else None
