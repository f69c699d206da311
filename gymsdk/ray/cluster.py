"""Connect this process to a Ray cluster, and start and stop a cluster of its own."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import ray
from ray.job_config import JobConfig

from gymsdk.errors import GymsdkError, UsageError

ADDRESS_VARIABLE = "RAY_ADDRESS"
"""The environment variable with the address of a cluster, which Ray itself reads, too."""

LOCAL, AUTO = "local", "auto"
"""The addresses that start a cluster, and that find the cluster of this machine."""

CONNECT_SECONDS = 5.0
"""Seconds to wait for a connection to the address. Ray itself waits for minutes."""

NAMESPACE = "gymsdk"
"""The namespace of our actors."""

CLIENT_SERVER_FAILURE, CLIENT_ATTEMPTS = "Starting Ray client server failed", 3
"""Ray's message if the process that it starts for a client hangs, and the number of attempts to connect."""

VERSION_PATTERN = re.compile(r"Ray: (?P<ray>\S+).*?Python: (?P<python>[\d.]+)", re.DOTALL)


class _JobConfig(JobConfig):
    """A job whose workers do not search the working folder of this process, which Ray puts first on their path."""

    def _runtime_env_has_working_dir(self) -> bool:
        return True


@dataclass(frozen=True)
class RayCluster:
    """A cluster to which this process is connected.

    Attributes:
        address: The address for other processes of this machine: `HOST:PORT` of its head, or that of its client server.
        is_own: Whether this process started the cluster.
        dashboard_url: The URL of its dashboard, `None` without one.
    """

    address: str
    is_own: bool
    dashboard_url: str | None


@contextmanager
def connect(address: str) -> Iterator[RayCluster]:
    """Connect this process to the cluster at *address* while the context is open.

    A process that is connected already, such as an actor or the process of a trainer, stays connected.

    Args:
        address: `HOST:PORT` or `ray://HOST:PORT` of a cluster, `auto` for the cluster of this machine, or `local` to
            start one that ends with the context.

    Raises:
        UsageError: The address has another form.
        GymsdkError: No cluster answers, or it refuses this process.
    """
    if ray.is_initialized():
        yield RayCluster(_get_head_address(), is_own=False, dashboard_url=None)
        return
    check_address(address)
    dashboard = _initialize(address)
    cluster = RayCluster(
        address if _is_client() else _get_head_address(),
        is_own=address == LOCAL,
        dashboard_url=f"http://{dashboard}" if dashboard else None,
    )
    # Other libraries, and the processes that this one starts, find the same cluster.
    before = os.environ.get(ADDRESS_VARIABLE)
    os.environ[ADDRESS_VARIABLE] = cluster.address
    try:
        yield cluster
    finally:
        ray.shutdown()
        if before is None:
            os.environ.pop(ADDRESS_VARIABLE, None)
        else:
            os.environ[ADDRESS_VARIABLE] = before


def join(address: str | None) -> None:
    """Connect this process to the cluster at *address*, by default that of `RAY_ADDRESS`, until the process ends.

    Raises:
        UsageError: There is no address.
        GymsdkError: No cluster answers, or it refuses this process.
    """
    if ray.is_initialized():
        return
    address = address or os.environ.get(ADDRESS_VARIABLE)
    if not address:
        raise UsageError("offloaded functions run on Ray, but no cluster is named; set --ray-address or RAY_ADDRESS")
    check_address(address)
    _initialize(address)


def list_nodes() -> dict[str, int]:
    """Return the number of CPUs of each living node of the cluster, at least 1, by the id of the node."""
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return {node["NodeID"]: max(1, int(node["Resources"].get("CPU", 0))) for node in nodes if node["Alive"]}


def list_hosts() -> list[str]:
    """Return the addresses of the cluster's living nodes; nodes of one machine have the same address."""
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return sorted({node["NodeManagerAddress"] for node in nodes if node["Alive"]})


def get_own_host() -> str:
    """Return the address of this machine, as the nodes of the cluster reach it."""
    if not _is_client():
        host: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        return host
    # This machine is no node. Its address is that from which it reaches the client server; nothing is sent.
    parts = urlsplit(os.environ[ADDRESS_VARIABLE])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((parts.hostname, parts.port))
        name: tuple[str, int] = probe.getsockname()
        return name[0]


def check_address(address: str) -> None:
    """Raise `UsageError` if *address* has none of the forms that `connect` takes."""
    if address in {LOCAL, AUTO}:
        return
    parts = urlsplit(address if "://" in address else f"ray://{address}")
    with suppress(ValueError):
        if parts.scheme == "ray" and parts.hostname and parts.port and not parts.path and "@" not in address:
            return
    raise UsageError(
        f"{address!r} is not the address of a Ray cluster; write HOST:PORT, ray://HOST:PORT, auto, or local"
    )


def _initialize(address: str) -> str | None:
    """Connect this process, and return the address of the cluster's dashboard, if it has one."""
    if address not in {LOCAL, AUTO}:
        _check_reachable(address)
    options: dict[str, Any] = {"namespace": NAMESPACE, "log_to_driver": False, "configure_logging": False}
    if not address.startswith("ray://"):
        # The job of a client has the working folder of its client server.
        options["job_config"] = _JobConfig()
    for attempt in range(CLIENT_ATTEMPTS):
        try:
            context = ray.init(address=address, **options)
        except Exception as error:
            # Ray raises a plain Exception, too, for example if its processes take too long to start.
            if CLIENT_SERVER_FAILURE in str(error) and attempt + 1 < CLIENT_ATTEMPTS:
                continue
            raise GymsdkError(_explain(address, str(error))) from error
        break
    return context.dashboard_url or None


def _check_reachable(address: str) -> None:
    parts = urlsplit(address if "://" in address else f"ray://{address}")
    assert parts.hostname is not None
    assert parts.port is not None
    try:
        socket.create_connection((parts.hostname, parts.port), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        reason = error.strerror or str(error)
        raise GymsdkError(
            f"no Ray cluster answers at {address} ({reason}); name a running cluster, or `local` to start one"
        ) from error


def _explain(address: str, reason: str) -> str:
    """Return one sentence for the *reason* that Ray gives in several lines."""
    versions = [match.groupdict() for match in VERSION_PATTERN.finditer(reason)]
    if len(versions) > 1:
        cluster, own = versions[:2]
        return (
            f"the Ray cluster at {address} has Ray {cluster['ray']} and Python {cluster['python']},"
            f" and this process has Ray {own['ray']} and Python {own['python']}; use the same versions on both sides"
        )
    if address == AUTO and "running Ray instance" in reason:
        return "no Ray cluster runs on this machine; name one as HOST:PORT, or use `local` to start one"
    if reason.startswith("Failed to connect"):
        # Ray names the reason in its log only. The address accepts connections.
        mode = os.environ.get("RAY_AUTH_MODE", "disabled")
        advice = (
            f"(here RAY_AUTH_MODE is {mode}); set RAY_AUTH_MODE, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH, as on the"
            " nodes of the cluster"
        )
        if address == AUTO:
            return (
                "no Ray cluster runs on this machine that accepts this process: the last one has ended, or it requires"
                f" another authentication token {advice}"
            )
        return (
            f"{address} accepts connections, but not this process as a part of a Ray cluster: it is no Ray cluster, or"
            f" it requires another authentication token {advice}"
        )
    if reason.startswith("Initialization failure from server"):
        # The reason follows as a traceback of the client server.
        reason = reason.strip().splitlines()[-1]
    failure = "a Ray cluster cannot be started" if address == LOCAL else f"the Ray cluster at {address} cannot be used"
    return f"{failure}: {reason.strip().splitlines()[0]}"


def _get_head_address() -> str:
    address: str = ray.get_runtime_context().gcs_address
    return address


def _is_client() -> bool:
    """Whether this process is connected through a Ray client server, `ray://`."""
    connected: bool = ray.util.client.ray.is_connected()  # type: ignore[no-untyped-call]
    return connected
