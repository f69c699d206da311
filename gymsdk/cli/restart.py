"""`gymsdk restart`: one of the supervised servers of a head, ended well and started anew."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from gymsdk.cli import options
from gymsdk.errors import Failed, GymsdkError

if TYPE_CHECKING:
    from gymsdk.servers.nodes.reports import Nodes, Restarting

LOOKING = 0.25
"""Seconds between two looks whether another is there."""

ENDING = 15.0
"""Seconds that a server may take to end, beside what its sessions are given."""

CONFLICT = 409


class _Refused(GymsdkError):
    """The head knows nobody who could."""


def restart(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A server, as gymsdk status names it.")],
    *,
    head: options.Head = None,
    drain: Annotated[
        float, typer.Option(min=0, max=3600, metavar="SECONDS", help="How long its sessions may take to end.")
    ] = 30.0,
    timeout: Annotated[
        float, typer.Option(min=1, metavar="SECONDS", help="How long the new one may take to answer.")
    ] = 60.0,
) -> None:
    """Restart a server that gymsdk serve --separate supervises, once its sessions have ended."""
    from gymsdk.cli.stopping import Stopped, until_stopped
    from gymsdk.client import HEAD

    try:
        seconds = until_stopped(_restarted(name, (head or HEAD).rstrip("/"), drain=drain, seconds=timeout))
    except Stopped as stop:
        raise typer.Exit(stop.code) from None
    typer.echo(f"{name} has been restarted, and answers after {seconds:.1f} s")


async def _restarted(name: str, head: str, *, drain: float, seconds: float) -> float:
    """Give the seconds after which another *name* answers."""
    import asyncio
    from urllib.parse import quote

    from gymsdk import http

    clock = asyncio.get_running_loop().time
    began = clock()
    try:
        before = await _asked("GET", head, "/nodes")
        begins = await _begun(head, f"/servers/{quote(name, safe='')}/restart?drain={drain:g}")
        # They go one after another.
        bound = len(begins.pids) * (drain + ENDING + seconds)
        while not await _is_back(name, head, before, begins):
            if clock() - began > bound:
                look = f"gymsdk status --head {head}"
                raise GymsdkError(f"{name!r} does not answer again after {clock() - began:.0f} s; {look} says more")
            await asyncio.sleep(LOOKING)
        return clock() - began
    finally:
        await http.aclose()


async def _begun(head: str, path: str) -> Restarting:
    """Give what ends; a head that has just begun may be about to hear who could start them again."""
    import asyncio

    from gymsdk.servers.nodes.reports import Restarting

    while True:
        settled = (await _asked("GET", head, "/nodes")).get("settled", True)
        try:
            return Restarting.model_validate(await _asked("POST", head, path))
        except _Refused:
            if settled:
                raise
        await asyncio.sleep(LOOKING)


async def _is_back(name: str, head: str, before: Any, ending: Restarting) -> bool:
    """Whether all that are *ending* of the server *name* are gone, and others there instead."""
    from gymsdk.servers.nodes.reports import ITSELF, Nodes

    try:
        now = Nodes.model_validate(await _asked("GET", head, "/nodes"))
    except GymsdkError:
        # The head itself is between two lives, or a moment too busy.
        return False
    then = Nodes.model_validate(before)
    if name == ITSELF:
        # Those that it knew are of no use to anybody before they have joined the new one.
        return _ends(now, name) != _ends(then, name) and (now.settled or _has(now, then))
    known = {each.id for each in then.instances}
    there = [each for each in now.instances if each.name == name]
    new = [each for each in there if each.id not in known and each.status == "success"]
    return len(new) >= len(ending.pids) and not any(each.id in ending.instances for each in there)


def _has(now: Nodes, then: Nodes) -> bool:
    """Whether all that were there or expected *then* are there *now*; what the head itself has is so by its name."""
    members = {each.id for each in then.instances if each.node}
    names = {*then.expected, *(each.name for each in then.instances)}
    return members <= {each.id for each in now.instances} and names <= {each.name for each in now.instances}


def _ends(nodes: Nodes, name: str) -> float | None:
    ended = nodes.exits.get(name)
    return ended.at if ended else None


async def _asked(method: str, head: str, path: str) -> Any:
    """Give what the head answers; raises `GymsdkError` where it does not, or refuses."""
    from gymsdk import credentials, http
    from gymsdk.told import value_of

    carried, once = credentials.carried(None), http.ONCE
    try:
        if method == "POST":
            answer = await http.post(head + path, {}, headers=carried, timeout=5.0, retry=once)
        else:
            answer = await http.get(head + path, headers=carried, timeout=5.0, retry=once)
    except Failed as error:
        cure = "start one with `gymsdk serve NAME --separate`, or name it with --head"
        raise GymsdkError(f"no head answers at {head} ({error}); {cure}") from None
    if answer.status == credentials.UNAUTHORIZED:
        raise credentials.refused(answer.host, had_token=bool(carried))
    value = value_of(answer)
    if answer.ok and isinstance(value, dict):
        return value
    if answer.status == CONFLICT and isinstance(value, dict):
        raise _Refused(str(value.get("detail")))
    message = f"{http.host(head)} is no head of gymsdk: it answered {answer.status}"
    raise GymsdkError(f"{message}; name the right one with --head")
