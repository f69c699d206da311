"""The actor that plays rollouts on the cluster of a trainer."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import ray

from gymsdk import errors, load
from gymsdk.errors import BadConfig, GymsdkError, UsageError
from gymsdk.ray import GymActor
from gymsdk.ray.cluster import connect
from gymsdk.types import Row

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]


def read_rows(count: int) -> list[Row]:
    return [task.row() for task, _ in zip(load("tool_call").tasks("train", seed=0), range(count), strict=False)]


@pytest.mark.parametrize("replicas", [0, 2])
def test_rollouts_stream_from_the_actor_as_they_finish(cluster: Any, replicas: int) -> None:
    rows = read_rows(40)
    rows[7] = rows[7] | {"expected": 3}
    # The oracle finds the solution of a row without messages only if the episode is in its own process.
    rows[5] = rows[5] | {"responses_create_params": {"input": []}}
    with connect(cluster.address):
        gym = GymActor.options(num_cpus=0.5).remote(
            ["tool_call"], replicas=replicas, deployment={"cpus_per_replica": 0.5}
        )
        lines = dict(ray.get(reference) for reference in gym.run_rollouts.remote(rows, concurrency=16))
        health = ray.get(gym.health.remote())
        ray.get(gym.shutdown.remote())
        again = dict(ray.get(reference) for reference in gym.run_rollouts.remote(rows[:3]))
    assert sorted(lines) == [*range(40)]
    failed = lines.pop(7)
    assert ("reward" in failed, failed["gymsdk"]["outcome"], failed["_ng_failure_terminal"]) == (False, "failed", True)
    assert {line["reward"] for line in lines.values()} == {1.0}
    assert (
        len({instance["node"] for instance in health["instances"] if instance["name"] == "tool_call"}) == replicas + 1
    )
    assert sorted(again) == [0, 1, 2]


def test_errors_cross_ray_as_their_own_classes(cluster: Any) -> None:
    with connect(cluster.address):
        gym = GymActor.remote(["no_such_environment"])
        with pytest.raises(GymsdkError, match="no environment named 'no_such_environment'"):
            ray.get(gym.start.remote())
        several = GymActor.remote(["tool_call", "math"])
        with pytest.raises(UsageError, match="row 0 names no agent"):
            [ray.get(reference) for reference in several.run_rollouts.remote(read_rows(1))]


def test_every_error_can_be_pickled() -> None:
    for name in vars(errors):
        kind = getattr(errors, name)
        if isinstance(kind, type) and issubclass(kind, GymsdkError) and kind is not BadConfig:
            arguments = {"kind": "k"} if issubclass(kind, errors.EpisodeError) else {}
            error = kind("what happened", **arguments)
            copied = pickle.loads(pickle.dumps(error))
            assert (type(copied), str(copied)) == (kind, "what happened")
