"""Safety: what keeps a server from those who do not belong there, and from what is too much for it."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, SecretStr

from gymsdk.errors import UsageError
from gymsdk.servers import app
from gymsdk.servers.nodes.service import Scheme

HEADER_BYTES = 128 * 2**10
HEADERS = 256
CONNECTIONS = 20_000


class Limits(BaseModel):
    """What one server takes: bytes of a *body*, bytes of all *header* lines, how many *headers* and *connections*.

    *bodies* are the bytes that the large bodies of all requests under way may take in memory together, in all servers
    of the process; `None` is a quarter of the memory.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    body: int = Field(app.LARGEST, ge=1024)
    bodies: int | None = Field(None, ge=1024)
    header: int = Field(HEADER_BYTES, ge=1024)
    headers: int = Field(HEADERS, ge=16)
    connections: int = Field(CONNECTIONS, ge=1)

    def exceeds_header_limits(self, headers: Sequence[tuple[bytes, bytes]]) -> bool:
        """Whether the *headers* of a request are too many, or too long."""
        # What came in one piece was never incomplete, which is all that the parser bounds.
        return len(headers) > self.headers or sum(len(name) + len(value) for name, value in headers) > self.header


class Tls(BaseModel):
    """The *certificate* a server shows, with those that lead to its issuer's, and its *key*: PEM files."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    certificate: Path
    key: Path

    def create_ssl_context(self) -> ssl.SSLContext:
        """Give what TLS is spoken by; raises `UsageError` where the files are no certificate and its key."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        for file in (self.certificate, self.key):
            if not file.is_file():
                raise UsageError(f"there is no file {file}; --tls-cert and --tls-key name PEM files")
        try:
            # A key under a password would ask for it on the terminal.
            context.load_cert_chain(self.certificate, self.key, password=_unknown)
        except _Locked:
            raise UsageError(f"the key in {self.key} needs a password; give one that needs none") from None
        except (OSError, ssl.SSLError) as error:
            why = getattr(error, "reason", None) or error.strerror or error
            files = f"the certificate {self.certificate} and the key {self.key}"
            raise UsageError(f"{files} cannot be used ({why}); give PEM files that belong together") from None
        return context


class _Locked(Exception):
    """A key asks for its password."""


def _unknown() -> str:
    raise _Locked


class Safety(BaseModel):
    """Who may ask a server, what is spoken, what it takes: if nothing is said, everybody, in the open, the usual."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    token: SecretStr | None = None
    tls: Tls | None = None
    limits: Limits = Limits()

    @property
    def scheme(self) -> Scheme:
        """What is spoken."""
        return "http" if self.tls is None else "https"


OPEN = Safety()
"""Of a server that anybody may ask who reaches it."""
