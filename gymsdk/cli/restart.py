"""`gymsdk restart`: one of the supervised servers of a head, ended well and started anew."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gymsdk.cli import options
from gymsdk.errors import Failed, GymsdkError, UsageError

if TYPE_CHECKING:
    from gymsdk.servers.nodes.members import Nodes

LOOKING = 0.25
"""Seconds between two looks whether another is there."""

ENDING = 15.0
"""Seconds that a server may take to end, beside what its sessions are given."""

CONFLICT = 409


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
        pids = set((await _asked("POST", head, f"/servers/{quote(name, safe='')}/restart?drain={drain:g}"))["pids"])
        while not await _is_back(name, head, before, pids):
            if clock() - began > drain + ENDING + seconds:
                look = f"gymsdk status --head {head}"
                raise GymsdkError(f"{name!r} does not answer again after {clock() - began:.0f} s; {look} says more")
            await asyncio.sleep(LOOKING)
        return clock() - began
    finally:
        await http.aclose()


async def _is_back(name: str, head: str, before: Any, pids: Collection[int]) -> bool:
    """Whether each of the processes *pids* of the server *name* is gone, and another there instead."""
    from gymsdk.servers.nodes.members import HEAD, Nodes

    try:
        now = Nodes.model_validate(await _asked("GET", head, "/nodes"))
    except UsageError:
        # The head itself is between two lives, or a moment too busy.
        return False
    if name == HEAD:
        return _ends(now, name) != _ends(Nodes.model_validate(before), name)
    known = {each["id"] for each in before["instances"]}
    there = [each for each in now.instances if each.name == name]
    new = [each for each in there if each.id not in known and each.status == "success"]
    return len(new) >= len(pids) and not any(each.pid in pids for each in there)


def _ends(nodes: Nodes, name: str) -> float | None:
    ended = nodes.exits.get(name)
    return ended.at if ended else None


async def _asked(method: str, head: str, path: str) -> Any:
    """Give what the head answers; raises `UsageError` where it does not, or refuses."""
    from gymsdk import credentials, http
    from gymsdk.told import value_of

    carried, once = credentials.carried(None), http.Retry(times=0)
    try:
        if method == "POST":
            answer = await http.post(head + path, {}, headers=carried, timeout=5.0, retry=once)
        else:
            answer = await http.get(head + path, headers=carried, timeout=5.0, retry=once)
    except Failed as error:
        sentence = f"no head answers at {head} ({error})"
        raise UsageError(f"{sentence}; start one with `gymsdk serve NAME --separate`, or name it with --head") from None
    if answer.status == credentials.UNAUTHORIZED:
        raise UsageError(str(credentials.refused(answer.host, carried=bool(carried))))
    value = value_of(answer)
    if answer.ok and isinstance(value, dict):
        return value
    if answer.status == CONFLICT and isinstance(value, dict):
        raise UsageError(str(value.get("detail")))
    message = f"{http.host(head)} is no head of gymsdk: it answered {answer.status}"
    raise UsageError(f"{message}; name the right one with --head")
