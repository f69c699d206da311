"""Read configuration files, ours and NeMo Gym's, into a `Deployment` that knows where each setting comes from."""

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
