"""A service: one running server as others are told of it."""

from __future__ import annotations

import os
import secrets
import time
from typing import Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

Kind: TypeAlias = Literal["resources_servers", "responses_api_agents", "responses_api_models", "environment_servers"]
"""What a server is, in NeMo Gym's words."""

Scheme: TypeAlias = Literal["http", "https"]
"""What is spoken: https is HTTP over TLS."""

ANYWHERE = frozenset({"", "0.0.0.0", "::"})  # noqa: S104  # told apart, not bound here
"""Hosts that stand for all of a machine's."""

INSTANCE = r"[0-9a-f]{12}"
"""What the id of an instance is like."""


def fresh() -> str:
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
    id: str = Field(default_factory=fresh, pattern=f"^{INSTANCE}$")

    def seen(self, host: str) -> Service:
        """Give it as somebody sees it who calls this machine *host*."""
        return self.model_copy(update={"host": host}) if self.host in ANYWHERE else self

    @property
    def url(self) -> str:
        """The address it answers at."""
        return url(self.host, self.port, self.scheme)


def url(host: str, port: int, scheme: Scheme = "http") -> str:
    """Give the address of what listens at *host*, as this machine reaches it, and *port*."""
    near = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104  # told apart
    return f"{scheme}://[{near}]:{port}" if ":" in near else f"{scheme}://{near}:{port}"
