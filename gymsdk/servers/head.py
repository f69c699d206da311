"""The head: where clients find the other servers, in the words that NeMo Gym's clients read."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from gymsdk.servers.app import answer
from gymsdk.servers.app import app as bare
from gymsdk.servers.figures import Figures
from gymsdk.transcript import Item

Kind: TypeAlias = Literal["resources_servers", "responses_api_agents", "responses_api_models", "environment_servers"]
"""What a server is, in NeMo Gym's words."""

Status: TypeAlias = Literal["success", "connection_error", "timeout", "unknown_error"]
"""How a server answers, in NeMo Gym's words."""

ENTRYPOINT = "app.py"
"""What NeMo Gym's clients expect a server to be started by."""

ANYWHERE = frozenset({"", "0.0.0.0", "::"})  # noqa: S104  # told apart, not bound here
"""Hosts that stand for all of a machine's."""

PATIENCE = 2.0
"""Seconds a server may take to say that it is there."""

HOST = re.compile(r"([A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(:[0-9]{1,5})?")


class Service(BaseModel):
    """One running server: the *name* of this instance, its kind and implementation, where it listens.

    *fields* go into its block of the configuration.
    """

    model_config = ConfigDict(frozen=True)

    name: str
    kind: Kind
    implementation: str
    host: str = "127.0.0.1"
    port: int = 0
    fields: dict[str, Any] = {}
    pid: int = Field(default_factory=os.getpid)
    started: float = Field(default_factory=time.time)

    def seen(self, host: str) -> Service:
        """Give it as somebody sees it who calls this machine *host*."""
        return self.model_copy(update={"host": host}) if self.host in ANYWHERE else self

    @property
    def url(self) -> str:
        """The address it answers at."""
        return url(self.host, self.port)


def url(host: str, port: int) -> str:
    """Give the address of what listens at *host*, as this machine reaches it, and *port*."""
    near = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104  # told apart
    return f"http://[{near}]:{port}" if ":" in near else f"http://{near}:{port}"


def app(
    services: Sequence[Service],
    *,
    host: str,
    port: int,
    about: Item | None = None,
    ready: Callable[[], bool] = lambda: True,
) -> FastAPI:
    """Give the head at *host* and *port* of *services*; *about* goes into the configuration, *ready* says they answer.

    Hosts that stand for all of a machine's are told to each client as it called this one.
    """
    made = bare(
        "head",
        "The head: which servers there are, and where.",
        figures=Figures("head"),
        ready=ready,
        waiting=("/readyz", "/healthz", "/health"),
    )

    async def configured(request: Request) -> Response:
        return answer(text(services, host=host, port=port, about=about, seen=called(request)))

    async def instances(request: Request) -> Response:
        statuses = await asyncio.gather(*(status(each.host, each.port) for each in services))
        seen = (each.seen(called(request)) for each in services)
        return answer([_instance(each, one) for each, one in zip(seen, statuses, strict=True)])

    made.add_api_route("/global_config_dict_yaml", configured, methods=["GET"])
    made.add_api_route("/server_instances", instances, methods=["GET"])
    return made


def called(request: Request) -> str:
    """Give the host a client called, as it wrote it, or else the address it reached."""
    if found := HOST.fullmatch(request.headers.get("host", "")):
        return found[1].strip("[]")
    return (request.scope.get("server") or ("127.0.0.1",))[0] or "127.0.0.1"


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
    return own | {each.name: _block(each.seen(seen)) for each in services}


def _block(service: Service) -> Item:
    """Give a server's block; of its settings nothing is told: any of them may be a secret."""
    place = {"entrypoint": ENTRYPOINT, "host": service.host, "port": service.port}
    return {service.kind: {service.implementation: {**place, **service.fields}}}


def _instance(service: Service, status: Status) -> Item:
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


async def status(host: str, port: int, *, path: str = "/", seconds: float = PATIENCE) -> Status:
    """Give how the server at *host* and *port* answers, within *seconds*, when it is asked for *path*."""
    near = url(host, port).removeprefix("http://").rpartition(":")[0].strip("[]")
    try:
        async with asyncio.timeout(seconds):
            first = await _first_line(near, port, path)
    except TimeoutError:
        return "timeout"
    except OSError:
        return "connection_error"
    return "success" if re.match(rb"HTTP/1\.[01] [234]", first) else "unknown_error"


async def _first_line(host: str, port: int, path: str) -> bytes:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n".encode())
        return await reader.readline()
    finally:
        writer.close()
