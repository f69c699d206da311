"""`gymsdk restart`: drain, stop and restart a supervised server."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import BaseModel, Field

from gymsdk.cli.fields import Only, take_models
from gymsdk.cli.output import echo
from gymsdk.errors import Failed, GymsdkError
from gymsdk.rollouts.settings import Servers
from gymsdk.settings import LIMITS, Flag

if TYPE_CHECKING:
    from gymsdk.cluster.reports import HeadSnapshot, RestartReply

POLL_SECONDS = 0.25
"""Seconds between two requests that check whether the new server answers."""

STOP_SECONDS = 15.0
"""Seconds a server may take to stop, in addition to the time its sessions get."""


class _NoSupervisor(GymsdkError):
    """The head knows no supervisor that can restart the server."""


class Waits(BaseModel):
    """How long the command waits."""

    drain: Annotated[float, Flag(LIMITS, "SECONDS")] = Field(
        30.0, ge=0, le=3600, allow_inf_nan=True, description="Wait up to this long for the server's sessions to end."
    )
    timeout: Annotated[float, Flag(LIMITS, "SECONDS")] = Field(
        60.0, ge=1, allow_inf_nan=True, description="Wait up to this long for the new server to answer."
    )


@take_models
def restart(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name the server, as `gymsdk status` shows it.")],
    *,
    servers: Annotated[Servers, Only("head")],
    waits: Waits,
) -> None:
    """Restart a supervised server after its sessions have ended.

    The servers of `gymsdk serve --separate` are supervised, and the workers of `gymsdk serve --workers N`, which have
    the names worker-1 to worker-N.

    Examples:
        gymsdk restart math
        gymsdk restart math --drain 300 --head http://127.0.0.1:11000
    """
    from gymsdk.cli.process import run_until_signal
    from gymsdk.client import DEFAULT_HEAD_URL

    seconds = run_until_signal(_restart_and_wait(name, (servers.head or DEFAULT_HEAD_URL).rstrip("/"), waits))
    echo(f"{name} restarted; it answers again after {seconds:.1f} s")


async def _restart_and_wait(name: str, head: str, waits: Waits) -> float:
    """Restart the server *name* and return the seconds until its replacement answers."""
    import asyncio
    from urllib.parse import quote

    clock = asyncio.get_running_loop().time
    began = clock()
    before = await _request_head("GET", head, "/nodes")
    restarting = await _request_restart(head, f"/servers/{quote(name, safe='')}/restart?drain={waits.drain:g}")
    # The instances restart one after another.
    bound = len(restarting.pids) * (waits.drain + STOP_SECONDS + waits.timeout)
    while not await _has_restarted(name, head, before, restarting):
        if clock() - began > bound:
            command = f"gymsdk status --head {head}"
            raise GymsdkError(
                f"{name!r} does not answer again after {clock() - began:.0f} s; run `{command}` for details"
            )
        await asyncio.sleep(POLL_SECONDS)
    return clock() - began


async def _request_restart(head: str, path: str) -> RestartReply:
    """Request the restart. A head that has just started may not know the supervisors yet, so retry until it does."""
    import asyncio

    from gymsdk.cluster.reports import RestartReply

    while True:
        settled = (await _request_head("GET", head, "/nodes")).get("settled", True)
        try:
            return RestartReply.model_validate(await _request_head("POST", head, path))
        except _NoSupervisor:
            if settled:
                raise
        await asyncio.sleep(POLL_SECONDS)


async def _has_restarted(name: str, head: str, before: Any, ending: RestartReply) -> bool:
    """Return whether every stopping instance of *name* is gone and as many new ones answer."""
    from gymsdk.cluster.reports import HEAD_NODE_ID, HeadSnapshot

    try:
        now = HeadSnapshot.model_validate(await _request_head("GET", head, "/nodes"))
    except GymsdkError:
        # The head itself is restarting, or is too busy to answer.
        return False
    then = HeadSnapshot.model_validate(before)
    if name == HEAD_NODE_ID:
        # A new head is of use only after the servers that the old one knew have registered with it.
        ends = [ended.at if (ended := nodes.exits.get(name)) else None for nodes in (now, then)]
        return ends[0] != ends[1] and (now.settled or _includes(now, then))
    known_ids = {instance.id for instance in then.instances}
    instances = [instance for instance in now.instances if name in {instance.name, instance.process}]
    # A worker has several servers, and all of them must be back.
    count = max(len(ending.pids), len(ending.instances))
    new = [instance for instance in instances if instance.id not in known_ids and instance.status == "success"]
    return len(new) >= count and not any(instance.id in ending.instances for instance in instances)


def _includes(now: HeadSnapshot, then: HeadSnapshot) -> bool:
    """Return whether *now* has all instances and servers of *then*. Servers in the head's process count by name."""
    members = {instance.id for instance in then.instances if instance.node}
    names = {*then.expected, *(instance.name for instance in then.instances)}
    known = {key for instance in now.instances for key in (instance.id, instance.name)}
    return members | names <= known


async def _request_head(method: str, head: str, path: str) -> Any:
    """Send a request to the head and return its JSON object. Raises `GymsdkError` if the head fails or refuses."""
    from gymsdk import credentials
    from gymsdk.client import parse_value
    from gymsdk.http import client

    headers, once = credentials.resolve_auth_headers(None), client.NO_RETRY
    try:
        if method == "POST":
            answer = await client.post(head + path, {}, headers=headers, timeout=5.0, retry=once)
        else:
            answer = await client.get(head + path, headers=headers, timeout=5.0, retry=once)
    except Failed as error:
        cure = "start a head with `gymsdk serve NAME --separate`, or pass another address with --head"
        raise GymsdkError(f"no head answers at {head} ({error}); {cure}") from None
    if answer.status == credentials.UNAUTHORIZED:
        raise credentials.build_unauthorized_error(answer.host, had_token=bool(headers))
    value = parse_value(answer)
    if answer.ok and isinstance(value, dict):
        return value
    if answer.status == HTTPStatus.CONFLICT and isinstance(value, dict):
        raise _NoSupervisor(str(value.get("detail")))
    message = f"{client.get_host(head)} is not a gymsdk head: it answered HTTP {answer.status}"
    raise GymsdkError(f"{message}; pass the address of the head with --head")
