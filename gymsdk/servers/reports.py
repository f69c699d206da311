"""What nodes report to the head, and what the head reports about nodes and servers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from gymsdk.observability.health import Status
from gymsdk.servers.service import Kind, Service
from gymsdk.types import Item

LEASE_SECONDS = 10.0
"""Seconds after its last report when a node counts as lost."""

HEAD_NODE_ID = "head"
"""Name of the head in lists of exited and restarted servers."""

MAX_ENTRIES = 1000
"""Largest number of entries in each part of a registration."""

MAX_DEPTH = 10
"""Deepest nesting of a service's fields."""

MAX_FIELDS_BYTES = 2**14
"""Largest size of a service's fields as JSON, in characters."""

HOST_PATTERN = re.compile(r"[A-Za-z0-9._-]{1,253}|[0-9A-Fa-f:.]{2,45}|")

Name = Annotated[str, StringConstraints(min_length=1, max_length=200)]


class Load(BaseModel):
    """The load of a server: its open sessions and running episodes."""

    model_config = ConfigDict(frozen=True)

    sessions: int = Field(0, ge=0)
    in_flight: int = Field(0, ge=0)

    @property
    def total(self) -> int:
        """Sessions and episodes together."""
        return self.sessions + self.in_flight


class Exit(BaseModel):
    """How a server's process ended last.

    Attributes:
        code: The exit code.
        at: When it ended, in seconds since the epoch.
        restarts: How often the server has been restarted.
        pid: The process id.
    """

    model_config = ConfigDict(frozen=True)

    code: int
    at: float = Field(allow_inf_nan=False)
    restarts: int = Field(0, ge=0)
    pid: int = 0

    def is_exit_of(self, service: Service) -> bool:
        """Return whether this is the exit of the service's process; the operating system may reuse a process id."""
        return service.pid == self.pid and service.started <= self.at


class Registration(BaseModel):
    """A node's report on itself, sent in full each time.

    Attributes:
        services: The node's servers.
        loads: Their load, by name.
        expected: The names of servers that should exist.
        exits: The last exits, by server name.
        draining: Whether the node accepts no new work.
        restarts: The processes that the node can restart, by server name.
        supervisor: The id of the supervisor. One of the nodes with this supervisor reports how processes end.
        seconds: How long the report is valid.
    """

    model_config = ConfigDict(frozen=True)

    services: list[Service] = Field([], max_length=MAX_ENTRIES)
    loads: dict[Name, Load] = Field({}, max_length=MAX_ENTRIES)
    expected: list[Name] = Field([], max_length=MAX_ENTRIES)
    exits: dict[Name, Exit] = Field({}, max_length=MAX_ENTRIES)
    draining: bool = False
    restarts: dict[Name, int] = Field({}, max_length=MAX_ENTRIES)
    supervisor: str = Field("", max_length=100)
    seconds: float = Field(LEASE_SECONDS, gt=0, le=3600)

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        for each in self.services:
            if _nesting_depth(each.fields) > MAX_DEPTH or len(json.dumps(each.fields)) > MAX_FIELDS_BYTES:
                bounds = f"{MAX_DEPTH} levels and {MAX_FIELDS_BYTES} characters at most"
                raise ValueError(f"the fields of the server {each.name!r} are too large: {bounds}")
            if not each.port or not HOST_PATTERN.fullmatch(each.host):
                raise ValueError(f"the server {each.name!r} has no valid address: {each.host[:80]!r}, port {each.port}")
        return self


class Instance(BaseModel):
    """One instance of a server, as the head reports it.

    Attributes:
        id: The instance's id.
        name: The server's name.
        kind: The kind of server.
        implementation: The implementation's name.
        url: The server's URL.
        node: The node's id; empty for the head's own process.
        load: The last reported load.
        age: The age of the load in seconds.
        status: The result of the last health check, or `None` before the first one.
        round_trip: How many seconds the last health check took.
        draining: Whether the instance accepts no new work.
        pid: The process id.
        started: When the process started, in seconds since the epoch.
        exit: How the previous process of the server ended, if a supervisor reports it.
    """

    model_config = ConfigDict(frozen=True)

    id: str
    name: str
    kind: Kind
    implementation: str
    url: str
    node: str = ""
    load: Load = Load()
    age: float = 0.0
    status: Status | None = None
    round_trip: float | None = None
    draining: bool = False
    pid: int = 0
    started: float = 0.0
    exit: Exit | None = None


class RestartReply(BaseModel):
    """The reply to a restart request: the processes that restart, and their known instances."""

    model_config = ConfigDict(frozen=True)

    restarting: str
    pids: list[int]
    instances: list[str]


class HeadSnapshot(BaseModel):
    """What the head knows.

    Attributes:
        lease: Seconds that a report is valid.
        settled: Whether every node that existed before the head started has had time to report.
        nodes: The registered nodes.
        lost: The lost nodes.
        instances: All instances of all servers.
        expected: The names of servers that should exist.
        exits: The last exits, by server name.
    """

    model_config = ConfigDict(frozen=True)

    lease: float = LEASE_SECONDS
    settled: bool = True
    nodes: list[Item] = []
    lost: list[Item] = []
    instances: list[Instance] = []
    expected: list[str] = []
    exits: dict[str, Exit] = {}


def _nesting_depth(value: object) -> int:
    """Return the nesting depth of a JSON value, without recursion."""
    depth, level = 0, [value]
    while level:
        depth, level = depth + 1, [inner for each in level for inner in _children(each)]
    return depth


def _children(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()
