"""Ray: join a cluster or start one, run offloaded functions on it, and place replicas of servers on its nodes.

This package needs the extra `gymsdk[ray]`. No other part of gymsdk imports Ray. `GymActor` plays rollouts on the
cluster of a trainer; the options `--ray-address`, `--offload` and `--replicas` use the rest.
"""

from gymsdk.ray.actor import GymActor
from gymsdk.ray.cluster import RayCluster, connect
from gymsdk.ray.executor import RayExecutor

__all__ = ["GymActor", "RayCluster", "RayExecutor", "connect"]
