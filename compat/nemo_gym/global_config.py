"""The configuration of a training run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from pydantic import BaseModel, ConfigDict

from gymsdk_nemo_compat.running import get_latest_run

__all__ = ["HEAD_SERVER_KEY_NAME", "GlobalConfigDictParserConfig", "get_global_config_dict"]

HEAD_SERVER_KEY_NAME = "head_server"
"""The key of the head server's address in the configuration."""


class GlobalConfigDictParserConfig(BaseModel):
    """Where the configuration of a run comes from. Later sources override earlier ones.

    Attributes:
        dotenv_path: A file to read instead of the `env.yaml` of the working folder; it need not exist.
        initial_global_config_dict: The configuration that the trainer passes. The files in its `config_paths` come
            before `dotenv_path`, the rest after it.
        skip_load_from_cli: Whether to ignore the command line of this process. Otherwise its arguments are overrides.
        skip_load_from_dotenv: Whether to read no `env.yaml` at all.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    dotenv_path: Path | None = None
    initial_global_config_dict: DictConfig | Mapping[str, Any] | None = None
    skip_load_from_cli: bool = False
    skip_load_from_dotenv: bool = False


def get_global_config_dict() -> DictConfig:
    """Return the configuration of the run that this process started last, with the address of each server.

    Raises:
        RuntimeError: This process runs no servers.
    """
    return OmegaConf.create(get_latest_run().config)
