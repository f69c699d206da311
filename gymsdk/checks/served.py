"""Served: an environment behind a resources server on a loopback port, for as long as a check plays against it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from gymsdk.environment import Environment
from gymsdk.types import Playable

STARTING = 30.0
"""Seconds a server may take until it answers."""

ENDING = 15.0
"""Seconds it may take to end."""

WHAT = "the server of this check"


@asynccontextmanager
async def served(environment: Environment) -> AsyncIterator[Playable]:
    """Give *environment* as clients reach it."""
    from gymsdk.servers import resources
    from gymsdk.servers.door import listener
    from gymsdk.servers.nodes.strand import Strand
    from gymsdk.servers.wire.remote import Remote

    at = listener.bound("127.0.0.1", what=WHAT)
    port = at.getsockname()[1]
    server = listener.Listener(resources.app(environment), at, grace=1.0)
    strand = Strand(WHAT, server.run)
    try:
        await strand.up(STARTING)
        yield Remote(f"http://127.0.0.1:{port}", environment.name)
    finally:
        await strand.end(ENDING)
