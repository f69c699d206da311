"""Train on an environment with TRL's `GRPOTrainer`: `pip install "gymsdk[trl]"`.

`rollout_func` plays whole episodes, in this process or through running servers, and returns exact tokens. `environment`
gives the tools of an environment to TRL's own tool loop.
"""

from gymsdk.trl.environments import Environments, environment
from gymsdk.trl.rollouts import RolloutFunc, rollout_func

__all__ = ["Environments", "RolloutFunc", "environment", "rollout_func"]
