"""Train on an environment with TRL's `GRPOTrainer`: `pip install "gymsdk[trl]"`.

`rollout_func` plays whole episodes, in this process or through running servers, and returns exact tokens.
"""

from gymsdk.trl.rollouts import RolloutFunc, rollout_func

__all__ = ["RolloutFunc", "rollout_func"]
