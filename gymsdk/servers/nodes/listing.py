"""A listing: the servers that a head knows in the words that NeMo Gym's clients read."""

from __future__ import annotations

import time
from collections.abc import Sequence

from gymsdk.addresses import ANYWHERE
from gymsdk.servers.nodes.choice import ROUTES
from gymsdk.servers.nodes.service import Service
from gymsdk.servers.watching.health import Status
from gymsdk.transcript import Item

ENTRYPOINT = "app.py"
"""What NeMo Gym's clients expect a server to be started by."""


def text(
    services: Sequence[Service], *, host: str, port: int, about: Item | None = None, seen: str = "127.0.0.1"
) -> str:
    """Give the configuration as YAML, for somebody who calls this machine *seen*."""
    import yaml

    written: str = yaml.safe_dump(config(services, host=host, port=port, about=about, seen=seen), sort_keys=False)
    return written


def config(
    services: Sequence[Service], *, host: str, port: int, about: Item | None = None, seen: str = "127.0.0.1"
) -> Item:
    """Give the configuration: the head's own keys, then a block of three levels for each server."""
    near = seen if host in ANYWHERE else host
    own: Item = {"head_server": {"host": near, "port": port}, "default_host": near, **(about or {})}
    return own | {each.name: _block(each.as_seen_from(seen)) for each in services}


def merged(theirs: Item, own: Item) -> Item:
    """Give what two say beside the servers' blocks: where they differ, what is our *own*."""
    routes = {**theirs.get(ROUTES, {}), **own.get(ROUTES, {})}
    return {**theirs, **own} | ({ROUTES: routes} if routes else {})


def _block(service: Service) -> Item:
    """Give a server's block; of its settings nothing is told: any of them may be a secret."""
    place: Item = {"entrypoint": ENTRYPOINT, "host": service.host, "port": service.port}
    # NeMo Gym's servers speak plain HTTP, and its clients know no key for anything else.
    spoken = {} if service.scheme == "http" else {"scheme": service.scheme}
    return {service.kind: {service.implementation: {**place, **spoken, **service.fields}}}


def entry(service: Service, status: Status) -> Item:
    """Give a server as the list of instances has it."""
    return {
        "config_path": service.name,
        "dir_path": f"{service.kind}/{service.implementation}",
        "entrypoint": ENTRYPOINT,
        "host": service.host,
        "name": service.implementation,
        "pid": service.pid,
        "port": service.port,
        "process_name": service.name,
        "server_type": service.kind,
        "start_time": service.started,
        "status": status,
        "uptime_seconds": round(max(0.0, time.time() - service.started), 3),
        "url": service.url,
    }
