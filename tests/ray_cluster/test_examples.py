"""The three examples of deployments with a trainer run as their README says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(400)]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "ray"


def run(*arguments: str) -> str:
    # Each example starts the clusters that it needs, also where other settings of Ray are usual.
    settings = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    completed = subprocess.run(
        [sys.executable, *arguments],
        cwd=EXAMPLES,
        env=settings,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr
    return completed.stdout


def read_mean(output: str) -> float:
    found = re.search(r"^32 rollouts .* mean reward (0\.\d+)$", output, re.MULTILINE)
    assert found is not None, output
    return float(found[1])


@pytest.mark.parametrize("replicas", [0, 1])
def test_a_trainer_plays_on_its_own_cluster(replicas: int) -> None:
    lines = run("trainer_cluster.py", "--replicas", str(replicas)).splitlines()
    groups = [re.fullmatch(r"group (\d): rewards \[(.*)\], advantages \[(.*)\]", line) for line in lines[:8]]
    assert sorted(match[1] for match in groups if match) == [str(number) for number in range(8)]
    for group in groups:
        assert group is not None
        rewards, advantages = ([float(number) for number in group[part].split(", ")] for part in (2, 3))
        assert advantages == [reward - sum(rewards) / 4 for reward in rewards]
    assert lines[8] == f"8 groups, 32 rollouts, {replicas + 1} instances of the environment"


def test_a_trainer_joins_a_running_cluster(cluster: Any) -> None:
    assert "8 groups, 32 rollouts, 1 instances" in run("trainer_cluster.py", "--address", cluster.address)


def test_a_trainer_without_ray_uses_a_cluster_of_gymsdk() -> None:
    assert 0.4 < read_mean(run("own_cluster.py")) < 1


def test_a_trainer_on_another_cluster_calls_the_servers_over_http() -> None:
    assert 0.4 < read_mean(run("separate_clusters.py")) < 1
