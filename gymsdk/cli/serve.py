"""`gymsdk serve`: environments behind HTTP, for trainers and everything that speaks to NeMo Gym."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import orjson
import typer

from gymsdk.cli import options
from gymsdk.errors import UsageError

if TYPE_CHECKING:
    from gymsdk.launch import Options, Running
    from gymsdk.types import Model

KINDS = {
    "resources_servers": "resources",
    "responses_api_agents": "agent",
    "environment_servers": "environment server",
    "responses_api_models": "model",
}
"""What people call the servers."""


def serve(  # noqa: PLR0913  # each is an option of the command
    names: options.Names,
    *,
    model: options.Model = "scripted/oracle",
    base_url: options.BaseUrl = [],  # noqa: B006  # typer copies it
    api: options.Api = None,
    pin: options.Pin = [],  # noqa: B006  # typer copies it
    token_ids: options.TokenIds = False,
    timeout: options.Timeout = 300.0,
    settings: options.Set = [],  # noqa: B006  # typer copies it
    host: Annotated[str, typer.Option(metavar="HOST", help="Where to listen; beyond loopback with --insecure.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, metavar="N", help="The head's port; 0 is any.")] = 11000,
    server_port: Annotated[
        list[str],
        typer.Option(metavar="SERVER=N", help="The port of another server; any, if not given.", show_default=False),
    ] = [],  # noqa: B006  # typer copies it
    insecure: Annotated[bool, typer.Option("--insecure", help="Let anybody who reaches the host use them.")] = False,
    turns: options.Turns = 32,
    tool_calls: options.ToolCalls = 128,
    deadline: options.Deadline = 600.0,
    ttl: Annotated[
        float,
        typer.Option(min=1, metavar="SECONDS", callback=options.finite, help="How long an unused session is kept."),
    ] = 3600.0,
    sessions: Annotated[
        int, typer.Option(min=1, metavar="N", help="Sessions of an environment that may be open.")
    ] = 10_000,
    mcp: Annotated[bool, typer.Option("--mcp", help="Offer the tools at /mcp too.")] = False,
    tries: Annotated[bool, typer.Option("--open", help="Print curl lines to try.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one line of JSON when ready.")] = False,
) -> None:
    """Serve environments over HTTP until Ctrl-C, as NeMo Gym's clients expect them."""
    from gymsdk.launch import Options
    from gymsdk.models import registry as models
    from gymsdk.sitting import Budget

    configured = options.settings(names, settings)
    asked = Options(
        host=host,
        port=port,
        ports=dict(map(_port, server_port)),
        insecure=insecure,
        ttl=ttl,
        sessions=sessions,
        mcp=mcp,
        budget=Budget(turns=turns, tools=tool_calls, seconds=deadline),
    )
    address, pinned = options.addresses(base_url), options.pinned(pin)
    player = models.model(model, base_url=address, api=api, timeout=timeout, pinned=pinned, tokens=token_ids)
    _serve(configured, player, asked, model, json=json, tries=tries)


def _serve(
    configured: dict[str, dict[str, Any]], player: Model, asked: Options, model: str, *, json: bool, tries: bool
) -> None:
    import sys
    from contextlib import redirect_stdout

    from gymsdk.addresses import public
    from gymsdk.cli.running import warnings
    from gymsdk.cli.stopping import Stopped, until_stopped

    shown = _Shown(public(model), out=sys.stdout, json=json, tries=tries)
    try:
        # What an author's code prints must not mix with what a program reads.
        with warnings(), redirect_stdout(sys.stderr):
            until_stopped(_served(configured, player, asked, shown))
    except Stopped as stop:
        # A server is there to be stopped: once it has been ready, that went well.
        raise typer.Exit(0 if shown.ready else stop.code) from None


def _port(pair: str) -> tuple[str, int]:
    name, equals, port = pair.rpartition("=")
    if not equals or not name or not re.fullmatch("[0-9]{1,5}", port) or int(port) > 65535:  # noqa: PLR2004  # the last
        raise UsageError(f"--server-port {pair}: write it as SERVER=N, as in --server-port math=11001")
    return name, int(port)


async def _served(configured: dict[str, dict[str, Any]], player: Model, asked: Options, shown: _Shown) -> None:
    from gymsdk import http
    from gymsdk.launch import serving

    with TemporaryDirectory(prefix="gymsdk-") as folder:
        try:
            async with serving(configured, model=player, settings=configured, options=asked) as running:
                await shown(running, Path(folder))
                await running.ended()
        finally:
            await http.aclose()


class _Shown:
    """Tells on *out* what runs, once it does; *ready* says that it has."""

    def __init__(self, model: str, *, out: TextIO, json: bool, tries: bool) -> None:
        self.ready = False
        self._model = model
        self._out = out
        self._json = json
        self._tries = tries

    async def __call__(self, running: Running, folder: Path) -> None:
        lines = [_line(running, self._model)] if self._json else [*_lines(running, self._model)]
        if self._tries and not self._json:
            from gymsdk.cli import curl

            for environment in running.environments:
                lines += ["", *await curl.lines(environment, running.urls, folder)]
        typer.echo("\n".join(lines), file=self._out)
        self._out.flush()
        self.ready = True


def _line(running: Running, model: str) -> str:
    """Give what runs as one line of JSON, for a program that waits for it."""
    servers = {each.name: {"url": each.url, "type": each.kind} for each in running.services}
    return orjson.dumps({"head": running.head_url, "pid": os.getpid(), "model": model, "servers": servers}).decode()


def _lines(running: Running, model: str) -> Iterator[str]:
    width = max(len(each.name) for each in running.services)
    yield f"{'head':<{width}}  {running.head_url}"
    for each in running.services:
        yield f"{each.name:<{width}}  {each.url}  {KINDS[each.kind]}"
    yield f"Ready: {_player(model)}. Ctrl-C ends it."


def _player(model: str) -> str:
    if model != "scripted/oracle":
        return f"{model} plays"
    return "scripted/oracle plays, which knows the answers; name another with --model"
