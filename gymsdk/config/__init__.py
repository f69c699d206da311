"""Configuration: NeMo Gym's YAML and ours, read into one deployment in which every setting knows its place."""

from __future__ import annotations

from gymsdk.config.model import (
    AgentServerConfig,
    DatasetConfig,
    Deployment,
    ModelServerConfig,
    ResourcesServerConfig,
    ServerConfig,
)
from gymsdk.config.read import check_environments, load_config, load_config_mapping

__all__ = [
    "AgentServerConfig",
    "DatasetConfig",
    "Deployment",
    "ModelServerConfig",
    "ResourcesServerConfig",
    "ServerConfig",
    "check_environments",
    "load_config",
    "load_config_mapping",
]
