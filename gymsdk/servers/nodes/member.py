"""A member: one node as a head knows it."""

from __future__ import annotations

from dataclasses import dataclass, field

from gymsdk.servers.nodes.reports import Registration
from gymsdk.servers.nodes.service import Service


@dataclass(slots=True)
class Order:
    """To start the process *pid* anew, which has the *instances* of these ids.

    Once its turn has come its sessions have *drain* seconds to end in, which is *until* then.
    """

    pid: int
    drain: float
    instances: tuple[str, ...] = ()
    until: float | None = None


@dataclass(slots=True)
class Member:
    """One node: what it said last, its services as they are reached, since when it is there, when it was last heard.

    *orders* say what it is to start anew, by the names of its servers.
    """

    id: str
    registration: Registration
    services: tuple[Service, ...]
    joined: float
    last_seen: float
    lease: float
    orders: dict[str, Order] = field(default_factory=dict)
