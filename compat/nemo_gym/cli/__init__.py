"""Start and stop the servers of a training run."""

from nemo_gym.cli.env import RunHelper
from nemo_gym.global_config import GlobalConfigDictParserConfig

__all__ = ["GlobalConfigDictParserConfig", "RunHelper"]
