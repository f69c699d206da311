"""The identity and address of one running server."""

from __future__ import annotations

import ipaddress
import os
import secrets
import time
from typing import Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from gymsdk.http.tls import WILDCARD_HOSTS, get_reachable_host, is_loopback

Kind: TypeAlias = Literal["resources_servers", "responses_api_agents", "responses_api_models", "environment_servers"]
"""The kind of server, in NeMo Gym's terms."""

Scheme: TypeAlias = Literal["http", "https"]
"""URL schemes."""

INSTANCE_ID_PATTERN = r"[0-9a-f]{12}"
"""Pattern of an instance id."""


def new_instance_id() -> str:
    """Return a new instance id."""
    return secrets.token_hex(6)


class Service(BaseModel):
    """One running server.

    Attributes:
        name: The server's name, which several instances may share.
        kind: The kind of server.
        implementation: The implementation's name.
        host: The host it listens on.
        port: The port.
        scheme: The URL scheme.
        fields: Further keys of its block in the configuration.
        pid: The process id.
        started: When it started, in seconds since the epoch.
        id: The instance's id.
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
        """Return the service with an address for a client that calls this machine `host`."""
        return self.model_copy(update={"host": host}) if self.host in WILDCARD_HOSTS else self

    def as_reached_at(self, address: str) -> Service:
        """Return the service with an address for other machines, if it listens on all interfaces.

        Args:
            address: The address from which the service's node called the head.
        """
        if self.host not in WILDCARD_HOSTS:
            return self
        try:
            parsed = ipaddress.ip_address(address)
        except ValueError:
            return self
        mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
        # A node on the head's own machine is reached at the head's address.
        return self if is_loopback(address) else self.model_copy(update={"host": str(mapped or parsed)})

    @property
    def url(self) -> str:
        """The server's base URL."""
        return build_url(self.host, self.port, self.scheme)


def build_url(host: str, port: int, scheme: Scheme = "http") -> str:
    """Build the URL of a server at `host` and `port`, as this machine reaches it."""
    at = get_reachable_host(host)
    return f"{scheme}://[{at}]:{port}" if ":" in at else f"{scheme}://{at}:{port}"
