"""The head server: NeMo Gym's directory of servers, and the registry that gymsdk nodes report to."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated

from fastapi import FastAPI, Query, Request, Response

from gymsdk.cluster.directory import ROUTES_KEY, build_shared_config, choose_services
from gymsdk.cluster.registry import LostNode, Node, NodeRegistry
from gymsdk.cluster.reports import (
    Exit,
    HeadSnapshot,
    HealthMonitor,
    Instance,
    Load,
    RayStatus,
    Registration,
    RestartReply,
    Service,
    Status,
    check_status,
)
from gymsdk.cluster.status import add_server_metrics
from gymsdk.config.fields import RAY_DASHBOARD_KEY
from gymsdk.config.model import RAY_ADDRESS_KEY
from gymsdk.edge.app import create_app as create_base_app
from gymsdk.edge.errors import RequestRejected
from gymsdk.edge.openapi import document_endpoint
from gymsdk.edge.request import json_response, read_json_object
from gymsdk.http.tls import WILDCARD_HOSTS, is_loopback
from gymsdk.observability.metrics import ServerMetrics, add_wait_metrics
from gymsdk.servers.requests import parse_body
from gymsdk.types import Item
from gymsdk.workers.resource_waits import REPLICAS

ENTRYPOINT = "app.py"
"""The entry point that NeMo Gym's clients expect of each server."""


MAX_REGISTRATION_BYTES = 2**24
"""Largest registration of a node in bytes."""

DEFAULT_DRAIN_SECONDS = 30.0
"""Default number of seconds that sessions get to finish before a restart."""

HOST_HEADER_PATTERN = re.compile(r"([A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(:[0-9]{1,5})?")

NODE_ID_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
"""Pattern of a node id."""

RESTART_RESPONSES = {202: "The restart is scheduled.", 409: "No supervisor can restart the server."}

REGISTRATION_RESPONSES = {410: "The node has left.", 411: "The request has no content-length."}


def build_config_yaml(
    services: Sequence[Service], *, host: str, port: int, about: Item | None = None, seen: str = "127.0.0.1"
) -> str:
    """Return the configuration as YAML, for a client that calls this machine `seen`."""
    import yaml

    document: str = yaml.safe_dump(
        build_config(services, host=host, port=port, about=about, seen=seen), sort_keys=False
    )
    return document


def build_config(
    services: Sequence[Service], *, host: str, port: int, about: Item | None = None, seen: str = "127.0.0.1"
) -> Item:
    """Build the configuration: the head's own keys, then a section with three levels for each server."""
    head_host = seen if host in WILDCARD_HOSTS else host
    own: Item = {"head_server": {"host": head_host, "port": port}, "default_host": head_host, **(about or {})}
    return own | {service.name: build_section(service.as_seen_from(seen)) for service in services}


def merge_configs(reported: Item, own: Item) -> Item:
    """Merge the configuration keys beside the servers' sections; `own` wins."""
    routes = {**reported.get(ROUTES_KEY, {}), **own.get(ROUTES_KEY, {})}
    return {**reported, **own} | ({ROUTES_KEY: routes} if routes else {})


def build_section(service: Service) -> Item:
    """Build a server's section of the configuration, without its settings: they may contain secrets."""
    port = service.shared_port or service.port
    address: Item = {"entrypoint": ENTRYPOINT, "host": service.host, "port": port}
    # NeMo Gym has no key for the scheme: its servers use plain HTTP.
    scheme = {} if service.scheme == "http" else {"scheme": service.scheme}
    return {service.kind: {service.implementation: {**address, **scheme, **service.fields}}}


def build_instance_entry(service: Service, status: Status) -> Item:
    """Build a server's entry in the list of instances."""
    return {
        "config_path": service.name,
        "dir_path": f"{service.kind}/{service.implementation}",
        "entrypoint": ENTRYPOINT,
        "host": service.host,
        "name": service.implementation,
        "pid": service.pid,
        "port": service.port,
        "process_name": service.name,
        "server_type": service.kind,
        "start_time": service.started,
        "status": status,
        "uptime_seconds": round(max(0.0, time.time() - service.started), 3),
        "url": service.url,
    }


def create_app(  # noqa: PLR0913 - keyword arguments, each named by its caller
    services: Sequence[Service],
    *,
    host: str,
    port: int,
    extra_config: Item | None = None,
    ready: Callable[[], bool] = lambda: True,
    registry: NodeRegistry | None = None,
    loads: Callable[[], Mapping[str, Load]] = dict,
    expected: Sequence[str] = (),
    fallback_services: Sequence[Service] = (),
    health: HealthMonitor | None = None,
) -> FastAPI:
    """Create the head server.

    Addresses that stand for all interfaces are returned as the host under which each client called the head.

    Args:
        services: The servers of this process.
        host: The head's host.
        port: The head's port.
        extra_config: Further keys of the configuration.
        ready: Reports whether this process's servers answer.
        registry: The registered nodes.
        loads: Returns the load of this process's servers by name.
        expected: The names of servers that should exist.
        fallback_services: Servers of this process that are listed only while no node offers one of the same name.
        health: Checks the health of servers.
    """
    registry = NodeRegistry(services, taken=extra_config or ()) if registry is None else registry
    figures = ServerMetrics("head")
    figures.add_gauge("nodes", "Nodes with servers.", lambda: sum(bool(node.services) for node in registry))
    add_wait_metrics(figures, REPLICAS)
    app = create_base_app(
        "head",
        "The head: lists the servers and their addresses.",
        metrics=figures,
        ready=ready,
        waiting=("/readyz", "/healthz", "/health"),
    )
    head = HeadEndpoints(
        services,
        registry,
        host=host,
        port=port,
        about=extra_config or {},
        loads=loads,
        expected=expected,
        fallback_services=fallback_services,
        health=health or HealthMonitor(),
    )
    add_server_metrics(figures, head.build_snapshot)
    app.add_api_route("/global_config_dict_yaml", head.get_config, methods=["GET"])
    app.add_api_route("/server_instances", head.list_instances, methods=["GET"])
    app.add_api_route("/nodes", head.list_nodes, methods=["GET"])
    docs = document_endpoint(Registration.model_json_schema(), more=REGISTRATION_RESPONSES)
    app.add_api_route("/nodes/{node}", head.register_node, methods=["PUT"], **docs)
    app.add_api_route("/nodes/{node}", head.remove_node, methods=["DELETE"])
    app.add_api_route(
        "/servers/{name}/restart",
        head.restart_server,
        methods=["POST"],
        **document_endpoint({}, more=RESTART_RESPONSES),
    )
    return app


class HeadEndpoints:
    """The endpoints of the head; the arguments are those of `create_app`."""

    def __init__(  # noqa: PLR0913 - keyword arguments, each named by its caller
        self,
        services: Sequence[Service],
        registry: NodeRegistry,
        *,
        host: str,
        port: int,
        about: Item,
        loads: Callable[[], Mapping[str, Load]],
        expected: Sequence[str],
        fallback_services: Sequence[Service],
        health: HealthMonitor,
    ) -> None:
        self._local = services
        self._registry = registry
        self._host = host
        self._port = port
        self._about = about
        self._loads = loads
        self._expected = expected
        self._fallback_services = fallback_services
        self._health = health

    async def get_config(self, request: Request) -> Response:
        """Return the configuration as YAML, with one section for each server name."""
        names = {service.name for service in self._registry.services}
        # A fallback is only listed while no node has a server of its name.
        redundant = {service.id for service in self._fallback_services if service.name in names}
        local = [service for service in self._local if service.id not in redundant]
        local_names = {service.name for service in local}
        remote = [service for service in self._registry.services if service.name not in local_names]
        # Health only matters where several instances have one name.
        counts = Counter(service.name for service in remote)
        ambiguous = [service for service in remote if counts[service.name] > 1]
        health = await self._health.statuses(ambiguous) if ambiguous else {}
        chosen = choose_services(remote, health, draining=self._registry.draining_instances)
        listed = [*local, *chosen.values()]
        about = merge_configs(build_shared_config([*chosen.values(), *self._fallback_services]), self._about)
        return json_response(
            build_config_yaml(listed, host=self._host, port=self._port, about=about, seen=requested_host(request))
        )

    async def list_instances(self, request: Request) -> Response:
        """List all servers with their current health."""
        services = self._all_services
        checks = (check_status(service.host, service.port, service.scheme) for service in services)
        statuses = await asyncio.gather(*checks)
        # Servers may have left during the checks.
        ids, seen = {service.id for service in self._all_services}, requested_host(request)
        return json_response(
            [
                build_instance_entry(service.as_seen_from(seen), status)
                for service, status in zip(services, statuses, strict=True)
                if service.id in ids
            ]
        )

    async def list_nodes(self, request: Request) -> Response:
        """Return the nodes and every instance of every server."""
        return json_response((await self.build_snapshot(requested_host(request))).model_dump(mode="json"))

    async def build_snapshot(self, seen: str) -> HeadSnapshot:
        """Build the snapshot of nodes and instances, for a client that calls this machine `seen`."""
        services = self._all_services
        self._health.keep(services)
        health, loads = await self._health.statuses(services), self._loads()
        # Nodes may have joined or left during the health checks.
        nodes, services = list(self._registry), self._all_services
        trips, draining, exits = (
            self._health.round_trips(services),
            self._registry.draining_instances,
            self._registry.exits_by_supervisor,
        )
        local = [_build_instance(service.as_seen_from(seen), health, loads) for service in self._local]
        remote = [
            _build_instance(
                service.as_seen_from(seen),
                health,
                node.registration.loads,
                node=node,
                age=round(self._registry.age(node), 3),
                draining=draining,
                exits=exits.get(node.registration.supervisor, {}),
            )
            for node in nodes
            for service in node.services
        ]
        return HeadSnapshot(
            lease=self._registry.lease,
            settled=self._registry.is_settled,
            nodes=[self._node_to_item(node) | {"lease": node.lease} for node in nodes],
            lost=[self._node_to_item(node) for node in self._registry.lost_nodes],
            instances=[
                service.model_copy(update={"round_trip": trips.get(service.id)}) for service in (*local, *remote)
            ],
            expected=[*dict.fromkeys([*self._expected, *self._registry.expected_servers])],
            exits=self._registry.exits,
            ray=RayStatus(
                address=self._about.get(RAY_ADDRESS_KEY, ""), dashboard=self._about.get(RAY_DASHBOARD_KEY, "")
            ),
        )

    async def register_node(self, request: Request, node: str) -> Response:
        """Store a node's registration for the duration of its lease."""
        # Checked before the body is read: without a length, it could have any size.
        length = request.headers.get("content-length", "")
        if not length.isdecimal():
            raise RequestRejected(411, "the request has no content-length")
        if int(length) > MAX_REGISTRATION_BYTES:
            raise RequestRejected(
                413,
                f"a node's registration may have at most {MAX_REGISTRATION_BYTES} bytes; give its servers fewer fields",
            )
        _check_node_id(node)
        registration = parse_body(Registration, await read_json_object(request))
        address = request.client.host if request.client else ""
        own = (request.scope.get("server") or ("",))[0] or ""
        check_services(registration.services, address, head_address=own, scheme=request.url.scheme)
        lease = self._registry.register(node, registration, address)
        names = self._registry.due_restarts(node)
        return json_response({"lease": lease} | ({"restart": names} if names else {}))

    async def restart_server(
        self, name: str, drain: Annotated[float, Query(ge=0, le=3600)] = DEFAULT_DRAIN_SECONDS
    ) -> Response:
        """Restart a server's processes one after another; each waits up to `drain` seconds for its sessions."""
        orders = self._registry.restart(name, drain)
        instances = [instance for order in orders for instance in order.instances]
        reply = RestartReply(restarting=name, pids=[order.pid for order in orders], instances=instances)
        return json_response(reply.model_dump(mode="json"), status=202)

    async def remove_node(self, node: str) -> Response:
        """Remove a node; removing an unknown node is no error."""
        _check_node_id(node)
        self._registry.leave(node)
        return json_response({})

    @property
    def _all_services(self) -> list[Service]:
        return [*self._local, *self._registry.services]

    def _node_to_item(self, node: Node | LostNode) -> Item:
        names = [service.name for service in node.services]
        return {"id": node.id, "servers": names, "age": round(self._registry.age(node), 3)}


def _check_node_id(node: str) -> None:
    if not NODE_ID_PATTERN.fullmatch(node):
        raise RequestRejected(
            422, f"a node id consists of letters, digits, dots, dashes and underscores, got {node[:80]!r}"
        )


def requested_host(request: Request) -> str:
    """Return the host that the client called, from its `Host` header, or the address that it reached."""
    if match := HOST_HEADER_PATTERN.fullmatch(request.headers.get("host", "")):
        return match[1].strip("[]")
    return (request.scope.get("server") or ("127.0.0.1",))[0] or "127.0.0.1"


def _build_instance(
    service: Service,
    health: Mapping[str, Status | None],
    loads: Mapping[str, Load],
    *,
    node: Node | None = None,
    age: float = 0.0,
    draining: Collection[str] = (),
    exits: Mapping[str, Exit] = MappingProxyType({}),
) -> Instance:
    return Instance(
        id=service.id,
        name=service.name,
        kind=service.kind,
        implementation=service.implementation,
        url=service.url,
        shared_url=service.shared_url,
        process=service.process,
        node=node.id if node else "",
        load=loads.get(service.name, Load()),
        age=age,
        status=health.get(service.id),
        draining=service.id in draining,
        pid=service.pid,
        started=service.started,
        exit=exits.get(service.process_name),
    )


def check_services(services: Sequence[Service], address: str, *, head_address: str, scheme: str) -> None:
    """Reject a node whose services other machines cannot reach, or would reach without TLS although the head uses it.

    Args:
        services: The node's services.
        address: The address from which the node called.
        head_address: The head's address that the node called.
        scheme: The scheme with which the node called.

    Raises:
        RequestRejected: A service is unreachable or would expose the token.
    """
    for service in services:
        if is_loopback(service.host) and not is_loopback(address) and address != head_address:
            unreachable = f"{service.name!r} listens at {service.host}, which only the machine {address} can reach"
            raise RequestRejected(
                422, f"{unreachable}; serve it with --host 0.0.0.0, or set its address with --advertise-host"
            )
        if scheme == "https" and service.scheme != "https":
            unencrypted = (
                f"{service.name!r} uses plain HTTP but this head uses TLS: clients would send their token unencrypted"
            )
            raise RequestRejected(422, f"{unencrypted}; serve it with --tls-cert and --tls-key")
