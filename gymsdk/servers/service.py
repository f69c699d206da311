"""A service: one running server as others are told of it."""

from __future__ import annotations

import ipaddress
import os
import secrets
import time
from typing import Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from gymsdk.http.tls import WILDCARD_HOSTS, get_reachable_host, is_loopback

Kind: TypeAlias = Literal["resources_servers", "responses_api_agents", "responses_api_models", "environment_servers"]
"""What a server is, in NeMo Gym's words."""

Scheme: TypeAlias = Literal["http", "https"]
"""What is spoken: https is HTTP over TLS."""

INSTANCE_ID_PATTERN = r"[0-9a-f]{12}"
"""What the id of an instance is like."""


def new_instance_id() -> str:
    """Give an id that no other instance has."""
    return secrets.token_hex(6)


class Service(BaseModel):
    """One running server: its *name*, its kind and implementation, where it listens; *id* is this instance's alone.

    *fields* go into its block of the configuration.
    """

    model_config = ConfigDict(frozen=True)

    name: str = Field(min_length=1, max_length=200)
    kind: Kind
    implementation: str = Field(min_length=1, max_length=200)
    host: str = Field("127.0.0.1", max_length=255)
    port: int = Field(0, ge=0, le=65535)
    scheme: Scheme = "http"
    fields: dict[str, Any] = {}
    pid: int = Field(default_factory=os.getpid)
    started: float = Field(default_factory=time.time)
    id: str = Field(default_factory=new_instance_id, pattern=f"^{INSTANCE_ID_PATTERN}$")

    def as_seen_from(self, host: str) -> Service:
        """Give it as somebody sees it who calls this machine *host*."""
        return self.model_copy(update={"host": host}) if self.host in WILDCARD_HOSTS else self

    def as_reached_at(self, address: str) -> Service:
        """Give it as it is reached whose node asks from *address*, where it says no host; on this machine, as it is."""
        if self.host not in WILDCARD_HOSTS:
            return self
        try:
            found = ipaddress.ip_address(address)
        except ValueError:
            return self
        mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
        # Whoever calls the head reaches it where he reaches the head.
        return self if is_loopback(address) else self.model_copy(update={"host": str(mapped or found)})

    @property
    def url(self) -> str:
        """The address it answers at."""
        return build_url(self.host, self.port, self.scheme)


def build_url(host: str, port: int, scheme: Scheme = "http") -> str:
    """Give the address of what listens at *host*, as this machine reaches it, and *port*."""
    at = get_reachable_host(host)
    return f"{scheme}://[{at}]:{port}" if ":" in at else f"{scheme}://{at}:{port}"
