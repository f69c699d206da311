"""What `gymsdk serve` does: the order made servers, who plays, and all of it until a signal comes."""

from __future__ import annotations

import asyncio
import logging as logs
import secrets
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import typer

from gymsdk.cli import handing
from gymsdk.cli.announcing import Shown
from gymsdk.cli.ordering import Order

if TYPE_CHECKING:
    from gymsdk.configuration import Block, Deployment
    from gymsdk.launch import Options
    from gymsdk.servers.watching.logs import Logging
    from gymsdk.types import Model

log = logs.getLogger("gymsdk")


def serve_until_stopped(order: Order, shown: Shown) -> None:
    """Serve as *order* says until a signal comes."""
    from gymsdk.cli.running import warnings
    from gymsdk.cli.stopping import Stopped, until_stopped
    from gymsdk.servers.watching.logs import kept
    from gymsdk.servers.watching.profiling import profiled

    order.player.check()
    deployment = order.read_deployment()
    for note in order.list_warnings(deployment):
        typer.echo(note, err=True)
    logging = order.build_logging(deployment)
    profile = order.profile or (deployment.profile if deployment else None)
    try:
        # What an author's code prints must not mix with what a program reads.
        told = nullcontext() if logging.takes_stderr else warnings()
        with told, kept(logging), profiled(profile), redirect_stdout(sys.stderr):
            until_stopped(_served(order, deployment, logging, shown), quiet=order.where.only is not None)
    except Stopped as stop:
        # A server is there to be stopped: once it has been ready, that went well.
        raise typer.Exit(0 if shown.ready else stop.code) from None


async def _served(order: Order, deployment: Deployment | None, logging: Logging, shown: Shown) -> None:
    from gymsdk import http, lifeline

    if order.where.socket_fd is not None:
        lifeline.held()
    try:
        async with _playing(order, deployment) as playing:
            if order.where.separate:
                await _apart(order, deployment, logging, shown, playing.inherited)
            else:
                await _together(order, deployment, playing.model, shown)
    finally:
        await http.aclose()


@dataclass(frozen=True, slots=True)
class Playing:
    """Who plays, and what is *handed* down for another process to have the same play."""

    model: Model | None
    inherited: handing.Handed


@asynccontextmanager
async def _playing(order: Order, deployment: Deployment | None) -> AsyncIterator[Playing]:
    """Give who plays: a model that is started here for as long as the context is open, where one is to be."""
    player = order.player
    handed = handing.Handed(
        overrides=order.overrides,
        settings=order.pairs,
        model=player.name,
        pins=player.pins,
        base_urls=player.base_urls,
        supervisor=secrets.token_hex(8),
    )
    if not player.launch:
        yield Playing(player.build_model(), handed)
        return
    from gymsdk.engine import Launch, launched

    name = (player.name or "").removeprefix("vllm/")
    seconds = deployment.readiness if deployment and deployment.readiness else 600.0
    launch = Launch(name=name, flags=player.flags, insecure=order.insecure, ending=5.0, starting=seconds)
    async with launched(launch) as engine:
        key = engine.key.get_secret_value() if engine.key else None
        told = handed.model_copy(update={"base_urls": (engine.url,), "key": key})
        yield Playing(player.build_model(base_url=engine.url, api_key=engine.key), told)


async def _together(order: Order, deployment: Deployment | None, model: Model | None, shown: Shown) -> None:
    from gymsdk.launch import serving

    with TemporaryDirectory(prefix="gymsdk-") as folder:
        async with serving(
            order.names, model=model, settings=order.settings, options=order.build_options(deployment), deployment=deployment
        ) as running:
            if order.where.only is None:
                player = order.player.name or running.model
                await shown(running.head_url, running.services, player, Path(folder), running.environments)
            shown.ready = True
            looking = asyncio.ensure_future(_look(running.model, order.where.only))
            try:
                await running.ended()
            finally:
                looking.cancel()


async def _look(model: Model | None, only: str | None) -> None:
    """Warn where the engine behind the policy's model server does not answer yet; the servers do."""
    from gymsdk.launch import POLICY

    trouble = getattr(model, "trouble", None)
    if trouble is not None and only in {None, POLICY} and (words := await trouble()):
        log.warning("%s", words)


async def _apart(
    order: Order,
    deployment: Deployment | None,
    logging: Logging,
    shown: Shown,
    handed: handing.Handed,
) -> None:
    from gymsdk.launch import placed, planned, running_here
    from gymsdk.separate import separated

    options = order.build_options(deployment).model_copy(update={"supervisor": handed.supervisor})
    safety = options.safety()
    options = await placed(options, deployment, safety)
    blocks = planned(order.names, order.player.name, order.settings, options, deployment)
    here = running_here(blocks, options, safety)
    words = [*handing.again(sys.argv[1:], order.overrides), *_default(order, deployment, options)]
    bare = logging.takes_stderr and logging.format == "json"
    async with separated(here, words, options=options, safety=safety, handed=handed.line(), bare=bare) as running:
        await shown(running.head_url, running.services, _played(blocks), None, ())
        await running.ended()


def _played(blocks: Sequence[Block]) -> str:
    """Who plays behind the policy's model server, where there is one."""
    from gymsdk.configuration import Player as Named

    parts = [each.part for each in blocks if each.kind == "responses_api_models"]
    return parts[0].name if parts and isinstance(parts[0], Named) else ""


def _default(order: Order, deployment: Deployment | None, options: Options) -> list[str]:
    """The words that say who plays where nobody did: one that has a head elsewhere would leave it to other nodes."""
    from gymsdk.launch import DEFAULT, leaves_model

    apart = order.player.name or leaves_model(deployment) or options.head or options.role
    return [] if apart else ["--model", DEFAULT]
