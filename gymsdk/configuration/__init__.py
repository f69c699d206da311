"""Configuration: NeMo Gym's YAML and ours, read into one deployment in which every setting knows its place."""

from __future__ import annotations

from gymsdk.configuration.consistency import check_environments
from gymsdk.configuration.deployment import Agent, Block, Dataset, Deployment, Player, Resources
from gymsdk.configuration.reading import from_mapping, read

__all__ = [
    "Agent",
    "Block",
    "Dataset",
    "Deployment",
    "Player",
    "Resources",
    "check_environments",
    "from_mapping",
    "read",
]
