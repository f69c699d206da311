"""Hosting: which servers run here, where they listen, what they may hold, and who may ask them."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr

from gymsdk import credentials
from gymsdk.addresses import is_loopback
from gymsdk.configuration.deployment import Block
from gymsdk.servers import resources
from gymsdk.servers.door import auth
from gymsdk.servers.door.listener import bound_within
from gymsdk.servers.door.prefix import prefix
from gymsdk.servers.door.safety import Limits, Safety, Tls
from gymsdk.servers.nodes.fleet import Times
from gymsdk.sitting import Budget
from gymsdk.topology import Role


class Options(BaseModel):
    """Where the servers listen and what they may hold: *port* is the head's, *ports* are others' by name, 0 is any.

    A session is closed *ttl* seconds after its last use, and at most *sessions* of an environment are open. *mcp*
    offers tools over MCP too, *budget* bounds the agents' episodes. Clients show the token in *token_file*, or in the
    file that GYMSDK_TOKEN_FILE names; without one, only this machine may reach them, unless that is *insecure*.

    *role* and *only* choose which of the servers run here: those of one kind, or the one of that name. With the URL of
    a *head* they are known there; others are told of them at the host *advertise_host*. *sockets* are there by now, by
    the name of the server or as `head_server`. Servers without a port have one of a *range*, if that is given, and none
    that is *disallowed*. A proxy shows the head at *root_path*, and each server beneath that by its name. Those that
    one *supervisor* starts know each other by that. Model calls of rollouts are captured in the folder *capture*.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    host: str = "127.0.0.1"
    port: int = Field(0, ge=0, le=65535)
    ports: dict[str, Annotated[int, Field(ge=0, le=65535)]] = {}
    advertise_host: str | None = None
    insecure: bool = False
    token_file: Path | None = None
    tls: Tls | None = None
    limits: Limits = Limits()
    ttl: float = Field(resources.TTL, gt=0)
    sessions: int = Field(resources.CAP, gt=0)
    mcp: bool = False
    budget: Budget = Budget()
    times: Times = Times()
    role: Role | None = None
    only: str | None = None
    head: str | None = None
    sockets: dict[str, socket.socket] = {}
    range: tuple[int, int] | None = None
    disallowed: tuple[int, ...] = ()
    root_path: Annotated[str, AfterValidator(prefix)] = ""
    supervisor: str = ""
    capture: Path | None = None

    def safety(self) -> Safety:
        """Give what keeps the servers safe; raises `UsageError` where they would not be, or a file is not right."""
        token = credentials.own(self.token_file)
        self.check(token, self.host)
        if self.tls is not None:
            self.tls.create_ssl_context()
        return Safety(token=token, tls=self.tls, limits=self.limits)

    def check(self, token: SecretStr | None, *hosts: str) -> None:
        """Refuse *hosts* where others reach one, and nobody is asked for a *token*; raises `UsageError`."""
        for host in hosts:
            auth.check(host, token, insecure=self.insecure or auth.insecure())


def socket_of(block: Block, options: Options) -> socket.socket | None:
    """Give the socket of a server that is there by now or has to be in a range, `None` where its port says enough."""
    if block.name in options.sockets or block.port or options.range is None:
        return options.sockets.get(block.name)
    host = options.host if block.host is None else block.host
    return bound_within(host, *options.range, but=options.disallowed, what=block.name)


def beside_head(options: Options) -> str | None:
    """Give the host of what the head begins itself: where others reach the head, they are to reach that."""
    at = options.sockets.get("head_server")
    return str(at.getsockname()[0]) if at is not None and is_loopback(options.host) else None
