"""The head: where clients find the other servers, in the words that NeMo Gym's clients read."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated

from fastapi import FastAPI, Query, Request, Response

from gymsdk.http.tls import WILDCARD_HOSTS
from gymsdk.observability.health import HealthMonitor, Status, check_status
from gymsdk.observability.metrics import ServerMetrics
from gymsdk.observability.status import add_server_metrics
from gymsdk.servers import registry
from gymsdk.servers.app import RequestRejected, document_endpoint, json_response, read_json_object
from gymsdk.servers.app import create_app as bare
from gymsdk.servers.instances import ROUTES_KEY, build_shared_config, choose_services
from gymsdk.servers.registry import LostNode, Node, NodeRegistry
from gymsdk.servers.reports import Exit, HeadSnapshot, Instance, Load, Registration, RestartReply
from gymsdk.servers.requests import parse_body
from gymsdk.servers.service import Service
from gymsdk.types import Item

ENTRYPOINT = "app.py"
"""What NeMo Gym's clients expect a server to be started by."""


def build_config_yaml(
    services: Sequence[Service], *, host: str, port: int, about: Item | None = None, seen: str = "127.0.0.1"
) -> str:
    """Give the configuration as YAML, for somebody who calls this machine *seen*."""
    import yaml

    written: str = yaml.safe_dump(build_config(services, host=host, port=port, about=about, seen=seen), sort_keys=False)
    return written


def build_config(
    services: Sequence[Service], *, host: str, port: int, about: Item | None = None, seen: str = "127.0.0.1"
) -> Item:
    """Give the configuration: the head's own keys, then a block of three levels for each server."""
    near = seen if host in WILDCARD_HOSTS else host
    own: Item = {"head_server": {"host": near, "port": port}, "default_host": near, **(about or {})}
    return own | {each.name: _build_block(each.as_seen_from(seen)) for each in services}


def merge_configs(theirs: Item, own: Item) -> Item:
    """Give what two say beside the servers' blocks: where they differ, what is our *own*."""
    routes = {**theirs.get(ROUTES_KEY, {}), **own.get(ROUTES_KEY, {})}
    return {**theirs, **own} | ({ROUTES_KEY: routes} if routes else {})


def _build_block(service: Service) -> Item:
    """Give a server's block; of its settings nothing is told: any of them may be a secret."""
    place: Item = {"entrypoint": ENTRYPOINT, "host": service.host, "port": service.port}
    # NeMo Gym's servers speak plain HTTP, and its clients know no key for anything else.
    spoken = {} if service.scheme == "http" else {"scheme": service.scheme}
    return {service.kind: {service.implementation: {**place, **spoken, **service.fields}}}


def build_instance_entry(service: Service, status: Status) -> Item:
    """Give a server as the list of instances has it."""
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


MAX_REGISTRATION_BYTES = 2**20
"""Bytes that a node may say of itself."""

DEFAULT_DRAIN_SECONDS = 30.0
"""Seconds that sessions have to end in before their server is started anew."""

HOST_HEADER_PATTERN = re.compile(r"([A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(:[0-9]{1,5})?")
NODE_ID_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
"""What a node may be called."""

RESTART_RESPONSES = {202: "It will be.", 409: "Nobody supervises it."}
REGISTRATION_RESPONSES = {410: "The node has left.", 411: "The body's length is not told."}


def create_app(  # noqa: PLR0913 - what a head has to tell, each by its name
    services: Sequence[Service],
    *,
    host: str,
    port: int,
    about: Item | None = None,
    ready: Callable[[], bool] = lambda: True,
    members: NodeRegistry | None = None,
    loads: Callable[[], Mapping[str, Load]] = dict,
    expected: Sequence[str] = (),
    supplied: Sequence[Service] = (),
    health: HealthMonitor | None = None,
) -> FastAPI:
    """Give the head at *host* and *port* of *services*; *about* goes into the configuration, *ready* says they answer.

    Hosts that stand for all of a machine's are told to each client as it called this one. *members* are the nodes that
    join, *loads* tells what the own services have to do, *expected* names those that are to be there. Of the own ones
    that were *supplied* for want of any, clients are told where no member has one. *health* asks how they are.
    """
    members = NodeRegistry(services, taken=about or ()) if members is None else members
    figures = ServerMetrics("head")
    figures.gauges["nodes"] = lambda: sum(bool(each.services) for each in members)
    made = bare(
        "head",
        "The head: which servers there are, and where.",
        figures=figures,
        ready=ready,
        waiting=("/readyz", "/healthz", "/health"),
    )
    head = HeadEndpoints(
        services,
        members,
        host=host,
        port=port,
        about=about or {},
        loads=loads,
        expected=expected,
        supplied=supplied,
        health=health or HealthMonitor(),
    )
    add_server_metrics(figures, head.build_snapshot)
    made.add_api_route("/global_config_dict_yaml", head.get_config, methods=["GET"])
    made.add_api_route("/server_instances", head.list_instances, methods=["GET"])
    made.add_api_route("/nodes", head.list_nodes, methods=["GET"])
    shape = document_endpoint(Registration.model_json_schema(), more=REGISTRATION_RESPONSES)
    made.add_api_route("/nodes/{node}", head.register_node, methods=["PUT"], **shape)
    made.add_api_route("/nodes/{node}", head.remove_node, methods=["DELETE"])
    made.add_api_route(
        "/servers/{name}/restart",
        head.restart_server,
        methods=["POST"],
        **document_endpoint({}, more=RESTART_RESPONSES),
    )
    return made


class HeadEndpoints:
    """The endpoints of the head at *host* and *port* of *services* and *members*."""

    def __init__(  # noqa: PLR0913 - what a head has to tell, each by its name
        self,
        services: Sequence[Service],
        members: NodeRegistry,
        *,
        host: str,
        port: int,
        about: Item,
        loads: Callable[[], Mapping[str, Load]],
        expected: Sequence[str],
        supplied: Sequence[Service],
        health: HealthMonitor,
    ) -> None:
        self._own = services
        self._members = members
        self._host = host
        self._port = port
        self._about = about
        self._loads = loads
        self._expected = expected
        self._supplied = supplied
        self._health = health

    async def get_config(self, request: Request) -> Response:
        """Give the configuration of all servers, one block for each name."""
        there = {each.name for each in self._members.services}
        spare = {each.id for each in self._supplied if each.name in there}
        mine = [each for each in self._own if each.id not in spare]
        own = {each.name for each in mine}
        others = [each for each in self._members.services if each.name not in own]
        # With one of a name there is nothing to choose.
        several = [each for each in others if sum(each.name == other.name for other in others) > 1]
        health = await self._health.statuses(several) if several else {}
        chosen = choose_services(others, health, draining=self._members.draining_instances)
        whole = [*mine, *chosen.values()]
        about = merge_configs(build_shared_config([*chosen.values(), *self._supplied]), self._about)
        return json_response(
            build_config_yaml(whole, host=self._host, port=self._port, about=about, seen=requested_host(request))
        )

    async def list_instances(self, request: Request) -> Response:
        """List every server, each asked as the list is made."""
        asked = self._all_services
        statuses = await asyncio.gather(*(check_status(each.host, each.port, each.scheme) for each in asked))
        there = {each.id for each in self._all_services}
        found = [(each, one) for each, one in zip(asked, statuses, strict=True) if each.id in there]
        return json_response(
            [build_instance_entry(each.as_seen_from(requested_host(request)), one) for each, one in found]
        )

    async def list_nodes(self, request: Request) -> Response:
        """Tell of the nodes, and of every instance of every server."""
        return json_response((await self.build_snapshot(requested_host(request))).model_dump(mode="json"))

    async def build_snapshot(self, seen: str) -> HeadSnapshot:
        """Give all that is known, for somebody who calls this machine *seen*."""
        asked = self._all_services
        self._health.keep(asked)
        health, loads = await self._health.statuses(asked), self._loads()
        # Some may have come or gone while they were asked.
        members, services = list(self._members), self._all_services
        trips, draining, supervised = (
            self._health.round_trips(services),
            self._members.draining_instances,
            self._members.exits_by_supervisor,
        )
        own = [_build_instance(each.as_seen_from(seen), health, loads) for each in self._own]
        theirs = [
            _build_instance(
                each.as_seen_from(seen),
                health,
                member.registration.loads,
                member=member,
                age=self._age(member),
                draining=draining,
                exits=supervised.get(member.registration.supervisor, {}),
            )
            for member in members
            for each in member.services
        ]
        return HeadSnapshot(
            lease=self._members.lease,
            settled=self._members.is_settled,
            nodes=[self._node_to_item(member) for member in members],
            lost=[self._lost_node_to_item(each) for each in self._members.lost_nodes],
            instances=[each.model_copy(update={"round_trip": trips.get(each.id)}) for each in (*own, *theirs)],
            expected=[*dict.fromkeys([*self._expected, *self._members.expected_servers])],
            exits=self._members.exits,
        )

    async def register_node(self, request: Request, node: str) -> Response:
        """Keep what a node says of itself, until its lease is over."""
        length = request.headers.get("content-length", "")
        if not length.isdecimal():
            raise RequestRejected(411, "the request does not say how long its body is")
        if int(length) > MAX_REGISTRATION_BYTES:
            raise RequestRejected(
                413, f"a node may say {MAX_REGISTRATION_BYTES} bytes of itself; give its servers fewer fields"
            )
        _check_node_id(node)
        said = parse_body(Registration, await read_json_object(request))
        address = request.client.host if request.client else ""
        own = (request.scope.get("server") or ("",))[0] or ""
        registry.check_services(said.services, address, own=own, scheme=request.url.scheme)
        lease = self._members.register(node, said, address)
        names = self._members.due_restarts(node)
        return json_response({"lease": lease} | ({"restart": names} if names else {}))

    async def restart_server(
        self, name: str, drain: Annotated[float, Query(ge=0, le=3600)] = DEFAULT_DRAIN_SECONDS
    ) -> Response:
        """Have a server end well, and be started anew, within *drain* seconds if its sessions last; one by one."""
        orders = self._members.restart(name, drain)
        pids, instances = [each.pid for each in orders], [one for each in orders for one in each.instances]
        found = RestartReply(restarting=name, pids=pids, instances=instances)
        return json_response(found.model_dump(mode="json"), status=202)

    async def remove_node(self, node: str) -> Response:
        """Have a node be gone; one that is not there has gone."""
        _check_node_id(node)
        self._members.leave(node)
        return json_response({})

    @property
    def _all_services(self) -> list[Service]:
        return [*self._own, *self._members.services]

    def _node_to_item(self, member: Node) -> Item:
        names = [each.name for each in member.services]
        return {"id": member.id, "servers": names, "age": self._age(member), "lease": member.lease}

    def _lost_node_to_item(self, lost: LostNode) -> Item:
        return {"id": lost.id, "servers": [each.name for each in lost.services], "age": self._age(lost)}

    def _age(self, member: Node | LostNode) -> float:
        return round(self._members.age(member), 3)


def _check_node_id(node: str) -> None:
    if not NODE_ID_PATTERN.fullmatch(node):
        raise RequestRejected(422, f"a node is called by letters, digits, dots and dashes, not {node[:80]!r}")


def requested_host(request: Request) -> str:
    """Give the host a client called, as it wrote it, or else the address it reached."""
    if found := HOST_HEADER_PATTERN.fullmatch(request.headers.get("host", "")):
        return found[1].strip("[]")
    return (request.scope.get("server") or ("127.0.0.1",))[0] or "127.0.0.1"


def _build_instance(
    service: Service,
    health: Mapping[str, Status | None],
    loads: Mapping[str, Load],
    *,
    member: Node | None = None,
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
        node=member.id if member else "",
        load=loads.get(service.name, Load()),
        age=age,
        status=health.get(service.id),
        draining=service.id in draining,
        pid=service.pid,
        started=service.started,
        exit=exits.get(service.name),
    )
