"""Reports: what a node says of itself, what is told of one server, and what a head says of all."""

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
"""Seconds after which a member that says nothing more is gone."""

HEAD_NODE_ID = "head"
"""What the head is called among the servers that ended or are started anew."""

MAX_ENTRIES = 1000
"""Services that one node has."""

MAX_DEPTH = 10
"""Levels that the fields of a service may be nested."""

MAX_FIELDS_BYTES = 2**14
"""Characters that the fields of a service may have as JSON."""

HOST_PATTERN = re.compile(r"[A-Za-z0-9._-]{1,253}|[0-9A-Fa-f:.]{2,45}|")

Name = Annotated[str, StringConstraints(min_length=1, max_length=200)]


class Load(BaseModel):
    """What a server has to do: open *sessions*, episodes *in_flight*."""

    model_config = ConfigDict(frozen=True)

    sessions: int = Field(0, ge=0)
    in_flight: int = Field(0, ge=0)

    @property
    def total(self) -> int:
        """All of it."""
        return self.sessions + self.in_flight


class Exit(BaseModel):
    """How a server's process *pid* ended last: its exit *code*, when, and how often it has been started anew."""

    model_config = ConfigDict(frozen=True)

    code: int
    at: float = Field(allow_inf_nan=False)
    restarts: int = Field(0, ge=0)
    pid: int = 0

    def is_exit_of(self, service: Service) -> bool:
        """Whether that was the process of *service*: a number may be another's later."""
        return service.pid == self.pid and service.started <= self.at


class Registration(BaseModel):
    """What a node says of itself, whole each time; it is to be heard of again within *seconds*.

    *expected* names the servers there are to be, *exits* tells of those that ended; *restarts* are the processes that
    it can start anew, by their servers. One that is *draining* is to be given nothing new. Of the nodes that name the
    same *supervisor*, one tells how the processes of the others end.
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
                raise ValueError(f"the server {each.name!r} has too much in its fields: {bounds}")
            if not each.port or not HOST_PATTERN.fullmatch(each.host):
                raise ValueError(f"the server {each.name!r} has no address: {each.host[:80]!r}, port {each.port}")
        return self


class Instance(BaseModel):
    """One of the servers of a *name*, as the head tells of it; its load is *age* seconds old.

    *node* is the member that has it, empty where the head itself has; *status* is `None` until it has been asked, and
    *round_trip* are the seconds its answer took. One that is *draining* is to be given nothing new. *exit* is how the
    process before this one ended, where it is supervised.
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
    """What ends to be started anew: the processes *pids*, and those of their *instances* that are known."""

    model_config = ConfigDict(frozen=True)

    restarting: str
    pids: list[int]
    instances: list[str]


class HeadSnapshot(BaseModel):
    """All that a head knows: the *nodes*, those it *lost*, every instance, which servers there are to be, which ended.

    It is *settled* once whoever was there before it has had the time to be heard of.
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
    """Give how deep *value* is nested, without the stack that another would be read with."""
    depth, level = 0, [value]
    while level:
        depth, level = depth + 1, [inner for each in level for inner in _children(each)]
    return depth


def _children(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()
