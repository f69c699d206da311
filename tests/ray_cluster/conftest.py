"""A real Ray cluster of three nodes on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

collect_ignore_glob = [] if find_spec("ray") else ["test_*.py"]
"""Without Ray, there is nothing to test: `pip install -e '.[ray]'`."""


@pytest.fixture(scope="session", autouse=True)
def settings() -> None:
    """Use no token: the nodes of the test cluster and the processes that attach are started in different ways."""
    os.environ["RAY_AUTH_MODE"] = "disabled"
    os.environ.pop("RAY_ADDRESS", None)


@pytest.fixture
def cluster() -> Iterator[Any]:
    """Yield a cluster with a head node of one CPU and two nodes of two CPUs."""
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=2)
        cluster.wait_for_nodes()
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()
