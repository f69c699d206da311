"""The head: where clients find the other servers, in the words that NeMo Gym's clients read."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated

from fastapi import FastAPI, Query, Request, Response

from gymsdk.servers.app import Refused, answer, body
from gymsdk.servers.app import app as bare
from gymsdk.servers.nodes import admission
from gymsdk.servers.nodes.choice import first, told
from gymsdk.servers.nodes.listing import entry, merged, text
from gymsdk.servers.nodes.losses import Loss
from gymsdk.servers.nodes.member import Member
from gymsdk.servers.nodes.members import Members
from gymsdk.servers.nodes.reports import Exit, Instance, Load, Nodes, Registration, Restarting
from gymsdk.servers.nodes.service import Service
from gymsdk.servers.watching.figures import Figures
from gymsdk.servers.watching.health import Health, Status, status
from gymsdk.servers.watching.watch import watched
from gymsdk.servers.wire.bodies import read
from gymsdk.servers.wire.documents import documented
from gymsdk.transcript import Item

LARGEST = 2**20
"""Bytes that a node may say of itself."""

DRAIN = 30.0
"""Seconds that sessions have to end in before their server is started anew."""

HOST = re.compile(r"([A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(:[0-9]{1,5})?")
NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
"""What a node may be called."""

RESTARTS = {202: "It will be.", 409: "Nobody supervises it."}
REFUSALS = {410: "The node has left.", 411: "The body's length is not told."}


def app(  # noqa: PLR0913 - what a head has to tell, each by its name
    services: Sequence[Service],
    *,
    host: str,
    port: int,
    about: Item | None = None,
    ready: Callable[[], bool] = lambda: True,
    members: Members | None = None,
    loads: Callable[[], Mapping[str, Load]] = dict,
    expected: Sequence[str] = (),
    supplied: Sequence[Service] = (),
    health: Health | None = None,
) -> FastAPI:
    """Give the head at *host* and *port* of *services*; *about* goes into the configuration, *ready* says they answer.

    Hosts that stand for all of a machine's are told to each client as it called this one. *members* are the nodes that
    join, *loads* tells what the own services have to do, *expected* names those that are to be there. Of the own ones
    that were *supplied* for want of any, clients are told where no member has one. *health* asks how they are.
    """
    members = Members(services, taken=about or ()) if members is None else members
    figures = Figures("head")
    figures.gauges["nodes"] = lambda: sum(bool(each.services) for each in members)
    made = bare(
        "head",
        "The head: which servers there are, and where.",
        figures=figures,
        ready=ready,
        waiting=("/readyz", "/healthz", "/health"),
    )
    head = Head(
        services,
        members,
        host=host,
        port=port,
        about=about or {},
        loads=loads,
        expected=expected,
        supplied=supplied,
        health=health or Health(),
    )
    watched(figures, head.build_snapshot)
    made.add_api_route("/global_config_dict_yaml", head.get_config, methods=["GET"])
    made.add_api_route("/server_instances", head.list_instances, methods=["GET"])
    made.add_api_route("/nodes", head.list_nodes, methods=["GET"])
    shape = documented(Registration.model_json_schema(), more=REFUSALS)
    made.add_api_route("/nodes/{node}", head.register_node, methods=["PUT"], **shape)
    made.add_api_route("/nodes/{node}", head.remove_node, methods=["DELETE"])
    made.add_api_route("/servers/{name}/restart", head.restart_server, methods=["POST"], **documented({}, more=RESTARTS))
    return made


class Head:
    """The endpoints of the head at *host* and *port* of *services* and *members*."""

    def __init__(  # noqa: PLR0913 - what a head has to tell, each by its name
        self,
        services: Sequence[Service],
        members: Members,
        *,
        host: str,
        port: int,
        about: Item,
        loads: Callable[[], Mapping[str, Load]],
        expected: Sequence[str],
        supplied: Sequence[Service],
        health: Health,
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
        chosen = first(others, health, draining=self._members.draining_instances)
        whole = [*mine, *chosen.values()]
        about = merged(told([*chosen.values(), *self._supplied]), self._about)
        return answer(text(whole, host=self._host, port=self._port, about=about, seen=called(request)))

    async def list_instances(self, request: Request) -> Response:
        """List every server, each asked as the list is made."""
        asked = self._all_services
        statuses = await asyncio.gather(*(status(each.host, each.port, each.scheme) for each in asked))
        there = {each.id for each in self._all_services}
        found = [(each, one) for each, one in zip(asked, statuses, strict=True) if each.id in there]
        return answer([entry(each.as_seen_from(called(request)), one) for each, one in found])

    async def list_nodes(self, request: Request) -> Response:
        """Tell of the nodes, and of every instance of every server."""
        return answer((await self.build_snapshot(called(request))).model_dump(mode="json"))

    async def build_snapshot(self, seen: str) -> Nodes:
        """Give all that is known, for somebody who calls this machine *seen*."""
        asked = self._all_services
        self._health.keep(asked)
        health, loads = await self._health.statuses(asked), self._loads()
        # Some may have come or gone while they were asked.
        members, services = list(self._members), self._all_services
        trips, draining, supervised = self._health.round_trips(services), self._members.draining_instances, self._members.exits_by_supervisor
        own = [_seen(each.as_seen_from(seen), health, loads) for each in self._own]
        theirs = [
            _seen(
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
        return Nodes(
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
            raise Refused(411, "the request does not say how long its body is")
        if int(length) > LARGEST:
            raise Refused(413, f"a node may say {LARGEST} bytes of itself; give its servers fewer fields")
        _check(node)
        said = read(Registration, await body(request))
        address = request.client.host if request.client else ""
        own = (request.scope.get("server") or ("",))[0] or ""
        admission.check(said.services, address, own=own, scheme=request.url.scheme)
        lease = self._members.register(node, said, address)
        names = self._members.due_restarts(node)
        return answer({"lease": lease} | ({"restart": names} if names else {}))

    async def restart_server(self, name: str, drain: Annotated[float, Query(ge=0, le=3600)] = DRAIN) -> Response:
        """Have a server end well, and be started anew, within *drain* seconds if its sessions last; one by one."""
        orders = self._members.restart(name, drain)
        pids, instances = [each.pid for each in orders], [one for each in orders for one in each.instances]
        found = Restarting(restarting=name, pids=pids, instances=instances)
        return answer(found.model_dump(mode="json"), status=202)

    async def remove_node(self, node: str) -> Response:
        """Have a node be gone; one that is not there has gone."""
        _check(node)
        self._members.leave(node)
        return answer({})

    @property
    def _all_services(self) -> list[Service]:
        return [*self._own, *self._members.services]

    def _node_to_item(self, member: Member) -> Item:
        names = [each.name for each in member.services]
        return {"id": member.id, "servers": names, "age": self._age(member), "lease": member.lease}

    def _lost_node_to_item(self, lost: Loss) -> Item:
        return {"id": lost.id, "servers": [each.name for each in lost.services], "age": self._age(lost)}

    def _age(self, member: Member | Loss) -> float:
        return round(self._members.age(member), 3)


def _check(node: str) -> None:
    if not NODE.fullmatch(node):
        raise Refused(422, f"a node is called by letters, digits, dots and dashes, not {node[:80]!r}")


def called(request: Request) -> str:
    """Give the host a client called, as it wrote it, or else the address it reached."""
    if found := HOST.fullmatch(request.headers.get("host", "")):
        return found[1].strip("[]")
    return (request.scope.get("server") or ("127.0.0.1",))[0] or "127.0.0.1"


def _seen(
    service: Service,
    health: Mapping[str, Status | None],
    loads: Mapping[str, Load],
    *,
    member: Member | None = None,
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
