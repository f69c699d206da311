"""Connect a command to a Ray cluster, and choose where offloaded functions run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple

import typer

from gymsdk.errors import GymsdkError, UsageError
from gymsdk.workers.offload import DEFAULT_EXECUTOR, get_worker_count

if TYPE_CHECKING:
    from gymsdk.config.model import Deployment
    from gymsdk.ray.cluster import RayCluster

ADDRESS_VARIABLE = "RAY_ADDRESS"
LOCAL = "local"
"""The address that starts a cluster."""

NO_CLUSTER = "none"
"""The address that uses no cluster, even if the configuration names one."""

INSTALL_HINT = "pip install 'gymsdk[ray]'"


def is_installed() -> bool:
    """Whether Ray is installed in this environment."""
    # Importing Ray takes longer than most commands.
    return find_spec("ray") is not None


def find_address(flag: str | None, configured: str | None = None) -> str | None:
    """Return the address of the cluster to use: that of the *flag*, the *configured* one, or that of `RAY_ADDRESS`.

    Without Ray, an address of the configuration has no effect but a line on standard error. `RAY_ADDRESS`, which may be
    meant for other programs, then has no effect.

    Raises:
        UsageError: The flag names a cluster, and Ray is not installed.
    """
    if is_installed():
        return flag or configured or os.environ.get(ADDRESS_VARIABLE) or None
    if flag is not None:
        raise UsageError(f"--ray-address {flag}: Ray is not installed; {INSTALL_HINT}")
    if configured is not None:
        typer.echo(
            f"ray_head_node_address is {configured}, and Ray is not installed; running without it ({INSTALL_HINT})",
            err=True,
        )
    return None


class ClusterChoice(NamedTuple):
    """The Ray cluster of a deployment.

    Attributes:
        deployment: The deployment with the address of its cluster.
        is_optional: Whether the servers can do without the cluster.
        note: Why there is no cluster, if the user may expect one; otherwise empty.
    """

    deployment: Deployment
    is_optional: bool = False
    note: str = ""


def choose_cluster(deployment: Deployment, flag: str | None = None, *, has_files: bool) -> ClusterChoice:
    """Choose the cluster of *deployment* by the *flag*, the configuration, and `RAY_ADDRESS`, in this order.

    With configuration files that name no cluster, NeMo Gym starts one, which the code of environments may use.

    Args:
        flag: The address that the command line names.
        has_files: Whether the deployment comes from configuration files.

    Raises:
        UsageError: The flag names a cluster, and Ray is not installed.
    """
    if NO_CLUSTER in {flag, deployment.ray_address}:
        return ClusterChoice(deployment.model_copy(update={"ray_address": None}))
    address, note = find_address(flag, deployment.ray_address), ""
    if address is None and has_files and deployment.ray_address is None:
        if is_installed():
            update = {"ray_address": LOCAL, "offload": deployment.offload or DEFAULT_EXECUTOR}
            return ClusterChoice(deployment.model_copy(update=update), is_optional=True)
        note = f"none, because Ray is not installed ({INSTALL_HINT})"
    return ClusterChoice(deployment.model_copy(update={"ray_address": address}), note=note)


@contextmanager
def connect_ray(address: str | None, offload: str | None, *, is_optional: bool = False) -> Iterator[RayCluster | None]:
    """Connect to the cluster at *address*, if there is one, and run offloaded functions where *offload* says.

    Args:
        address: The address, as `gymsdk.ray.cluster.connect` takes it.
        offload: Where offloaded functions run. By default, on the cluster that *address* names, else in local workers.
        is_optional: Whether the command continues without a cluster that cannot be used.

    Raises:
        UsageError: Functions should run on Ray, and no cluster is named.
        GymsdkError: The cluster does not accept this process.
    """
    # A wrong GYMSDK_WORKERS is an error of the command now, and not of each rollout later.
    if offload == DEFAULT_EXECUTOR or (offload is None and address is None):
        get_worker_count()
    if address is None:
        if offload == "ray":
            raise UsageError(
                "--offload ray needs a Ray cluster; name one with --ray-address, or start one with `local`"
            )
        _use(offload)
        yield None
        return
    from gymsdk.ray.cluster import connect

    if address == LOCAL:
        typer.echo("Starting Ray cluster...", err=True)
    with ExitStack() as stack:
        try:
            cluster = stack.enter_context(connect(address))
        except GymsdkError as error:
            if not is_optional:
                raise
            typer.echo(f"{error}; running without Ray", err=True)
            _use(offload)
            yield None
            return
        typer.echo(f"{'Started' if cluster.is_own else 'Using'} Ray cluster at {cluster.address}", err=True)
        _use(offload or "ray")
        yield cluster


def check_local_room(deployment: Deployment, address: str | None = None) -> None:
    """Raise `UsageError` if the replicas of *deployment* will not fit on the cluster that its address starts.

    Args:
        address: The address of the cluster, if it is not that of the deployment.
    """
    if deployment.replicas and (address or deployment.ray_address) == LOCAL:
        from gymsdk.ray import placement

        placement.check_local_room(deployment)


def _use(offload: str | None) -> None:
    if offload not in {None, DEFAULT_EXECUTOR}:
        from gymsdk.deploy.process import use_offload

        use_offload(offload)
