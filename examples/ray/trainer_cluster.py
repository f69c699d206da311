"""A trainer on Ray plays rollouts on its own cluster: gymsdk runs in an actor beside the trainer's workers.

usage: python trainer_cluster.py [--address HOST:PORT] [--base-url http://HOST:8000/v1] [--replicas N]
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from itertools import islice

import ray

from gymsdk import load
from gymsdk.ray import GymActor

GROUPS, SAMPLES = 8, 4
"""The number of tasks in a training step, and of rollouts of each task."""


@ray.remote(num_cpus=0.1)
class Learner:
    """In place of the trainer's optimizer: computes the advantages of a group, as GRPO does."""

    def step(self, rewards: list[float]) -> list[float]:
        """Return each reward minus the mean of its group."""
        mean = sum(rewards) / len(rewards)
        return [reward - mean for reward in rewards]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", default="local", help="the cluster of the trainer; by default a new one")
    parser.add_argument("--base-url", help="the generation server; by default a scripted policy")
    parser.add_argument("--replicas", type=int, default=0, help="replicas of the environment, placed by Ray")
    options = parser.parse_args()

    ray.init(address=options.address, log_to_driver=False)
    learner = Learner.remote()
    tasks = list(islice(load("math").tasks("train", seed=0), GROUPS))
    rows = [task.row() for task in tasks for _ in range(SAMPLES)]
    model, model_options = "scripted/oracle:0.75", {}
    if options.base_url is not None:
        model, model_options = "vllm/policy", {"base_url": options.base_url, "tokens": True}
    gym = GymActor.options(num_cpus=0.5).remote(
        ["math"],
        model=model,
        model_options=model_options,
        replicas=options.replicas,
        deployment={"cpus_per_replica": 0.5},
    )
    groups: dict[int, list[float]] = defaultdict(list)
    for reference in gym.run_rollouts.remote(rows):
        index, line = ray.get(reference)
        if "reward" not in line:
            raise SystemExit(f"rollout {index} failed: {line['_ng_failure_message']}")
        group = index // SAMPLES
        groups[group].append(line["reward"])
        # Rollouts arrive as they finish, so the trainer starts with the groups that are complete.
        if len(groups[group]) == SAMPLES:
            advantages = ray.get(learner.step.remote(groups[group]))
            print(f"group {group}: rewards {groups[group]}, advantages {advantages}")
    health = ray.get(gym.health.remote())
    ray.get(gym.shutdown.remote())
    instances = [instance for instance in health["instances"] if instance["name"] == "math"]
    print(f"{len(groups)} groups, {len(rows)} rollouts, {len(instances)} instances of the environment")
    ray.shutdown()


if __name__ == "__main__":
    main()
