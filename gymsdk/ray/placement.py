"""Whether a Ray cluster has room for the replicas of a deployment, and for the gradings that they send to it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Self

import ray
from ray.experimental.internal_kv import _internal_kv_get

from gymsdk.config.model import Deployment
from gymsdk.errors import UsageError
from gymsdk.ray.executor import CPUS_PER_TASK
from gymsdk.workers.offload import list_work

MAX_LISTED_NODES = 8
"""The number of nodes that a message lists."""

AUTOSCALER_REPORT = "__autoscaling_status"
"""The key under which Ray's autoscaler reports its nodes. A cluster of fixed size has a report, too."""

AUTOSCALER_KEY, AUTOSCALER_NAMESPACE = "__autoscaler_v2_enabled", "__autoscaler"
"""The key and the namespace by which Ray marks clusters with version 2 of its autoscaler."""

FIXED_NODE = re.compile(r"node_[0-9a-f]+")
"""The type that a report gives to a node that no autoscaler has started."""

UNITS = 10_000
"""Ray counts resources in ten-thousandths."""


class NodeRoom(NamedTuple):
    """The CPUs and GPUs of a node."""

    cpus: float
    gpus: float

    @classmethod
    def read(cls, resources: Mapping[str, float]) -> Self:
        """Return the CPUs and GPUs among the *resources* of a node or of a cluster."""
        return cls(resources.get("CPU", 0.0), resources.get("GPU", 0.0))


class Demand(NamedTuple):
    """The resources that a deployment reserves on a cluster.

    Attributes:
        replicas: The number of replicas.
        cpus: The CPUs of a replica, all on one node.
        gpus: The GPUs of a replica, likewise.
        has_gradings: Whether the replicas run offloaded functions as tasks of the cluster.
    """

    replicas: int
    cpus: float
    gpus: float
    has_gradings: bool

    @classmethod
    def of(cls, deployment: Deployment) -> Self:
        """Return the demand of *deployment* after its environments were loaded."""
        has_gradings = deployment.offload == "ray" and bool(list_work())
        return cls(deployment.replicas, deployment.cpus_per_replica, deployment.gpus_per_replica, has_gradings)

    def compute_grading_cpus(self, cpus: float) -> float:
        """Return what gradings reserve if they use all of *cpus*: each of these runs one task at a time."""
        return round(cpus) * CPUS_PER_TASK if self.has_gradings else 0.0

    def fits(self, nodes: Iterable[NodeRoom], *, free: Iterable[NodeRoom] | None = None) -> bool:
        """Return whether the replicas and the gradings fit on *nodes*, of which *free* is left, by default all."""
        listed = list(nodes)
        rest = [[round(node.cpus * UNITS), round(node.gpus * UNITS)] for node in (listed if free is None else free)]
        cpus, gpus, task = (round(number * UNITS) for number in (self.cpus, self.gpus, CPUS_PER_TASK))
        for _ in range(self.replicas):
            node = max((node for node in rest if node[0] >= cpus and node[1] >= gpus), default=None)
            if node is None:
                return False
            node[0] -= cpus
            node[1] -= gpus
        needed = round(self.compute_grading_cpus(sum(node.cpus for node in listed)) * UNITS)
        return sum(node[0] // task * task for node in rest) >= needed

    def describe(self, cpus: float) -> str:
        """Return the sum of the CPUs, and of the GPUs if there are any, on a cluster with *cpus*."""
        gradings = self.compute_grading_cpus(cpus)
        words = self._format_product(self.cpus, "CPU")
        words += f" + gradings {format_amount(gradings, 'CPU')}" if gradings else ""
        words += f" = {format_amount(self.replicas * self.cpus + gradings, 'CPU')}"
        if not self.gpus:
            return words
        gpus = self._format_product(self.gpus, "GPU")
        return f"{words}, {gpus} = {format_amount(self.replicas * self.gpus, 'GPU')}"

    def _format_product(self, number: float, unit: str) -> str:
        count = f"{self.replicas} {'replica' if self.replicas == 1 else 'replicas'}"
        return f"{count} × {format_amount(number, unit)}"  # noqa: RUF001  # the sign of a product


def check_room(deployment: Deployment) -> None:
    """Raise `UsageError` if the replicas and gradings of *deployment* can never fit on the cluster of this process.

    A cluster that grows is not refused for its present size.
    """
    if deployment.replicas and not can_grow():
        check_demand(Demand.of(deployment), list_room())


def check_local_room(deployment: Deployment) -> None:
    """Raise `UsageError` if a cluster that Ray starts on this machine will have no room for *deployment*."""
    try:
        from ray._private.resource_and_label_spec import ResourceAndLabelSpec
    except ImportError:
        # Another version of Ray: `check_room` refuses the deployment once the cluster runs.
        return
    spec = ResourceAndLabelSpec()
    # With an address, Ray does not search for that of this machine.
    spec.resolve(is_head=True, node_ip_address="127.0.0.1")
    check_demand(Demand.of(deployment), [NodeRoom(spec.num_cpus or 0, spec.num_gpus or 0)])


def check_demand(demand: Demand, nodes: Sequence[NodeRoom]) -> None:
    """Raise `UsageError` with the sum if *demand* does not fit on *nodes*."""
    if demand.fits(nodes):
        return
    cpus = sum(node.cpus for node in nodes)
    hint = "; a replica runs on one node" if len(nodes) > 1 else ""
    raise UsageError(
        f"{demand.describe(cpus)}, and the Ray cluster has {describe_nodes(nodes, with_gpus=demand.gpus > 0)}{hint}"
        f"; {ADVICE}"
    )


ADVICE = "lower --replicas or --cpus-per-replica, or add nodes to the cluster"


def list_room() -> list[NodeRoom]:
    """Return the CPUs and GPUs of the living nodes."""
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    return [NodeRoom.read(node["Resources"]) for node in nodes if node["Alive"]]


def get_free_room() -> NodeRoom:
    """Return the CPUs and GPUs of the cluster that nothing has reserved."""
    return NodeRoom.read(ray.available_resources())  # type: ignore[no-untyped-call]


def has_free_room(demand: Demand) -> bool:
    """Return whether the cluster has enough free CPUs and GPUs for *demand* on all nodes together."""
    free = get_free_room()
    cpus = demand.replicas * demand.cpus + demand.compute_grading_cpus(sum(node.cpus for node in list_room()))
    return round(free.cpus * UNITS) >= round(cpus * UNITS) and free.gpus >= demand.replicas * demand.gpus


def can_grow() -> bool:
    """Return whether an autoscaler adds nodes to the cluster of this process, as KubeRay's does."""
    if _internal_kv_get(AUTOSCALER_KEY, namespace=AUTOSCALER_NAMESPACE) == b"1":
        return True
    written = _internal_kv_get(AUTOSCALER_REPORT)
    report = (json.loads(written) if written else {}).get("autoscaler_report") or {}
    kinds = {*(report.get("active_nodes") or ()), *(report.get("node_type_mapping") or {}).values()}
    return any(not FIXED_NODE.fullmatch(kind) for kind in kinds)


def describe_nodes(nodes: Sequence[NodeRoom], *, with_gpus: bool) -> str:
    """Return the CPUs of *nodes*, in sum and by node, and their GPUs."""
    cpus = [node.cpus for node in nodes]
    words = format_amount(sum(cpus), "CPU")
    if len(nodes) > 1:
        listed = " + ".join(f"{number:g}" for number in sorted(cpus, reverse=True)[:MAX_LISTED_NODES])
        words += f" ({listed}{' + …' if len(nodes) > MAX_LISTED_NODES else ''})"
    return f"{words} and {format_amount(sum(node.gpus for node in nodes), 'GPU')}" if with_gpus else words


def format_amount(number: float, unit: str) -> str:
    """Return a number of CPUs or GPUs."""
    return f"{round(number, 4):g} {unit}" if number == 1 else f"{round(number, 4):g} {unit}s"
