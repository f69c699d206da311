"""What `gymsdk serve` does: the options and the files made one, who plays, and the servers until a signal comes."""

from __future__ import annotations

import asyncio
import json
import logging as logs
import os
import socket
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import typer

from gymsdk.cli import options as given
from gymsdk.cli.announcing import Shown
from gymsdk.errors import UsageError
from gymsdk.wire import Api

if TYPE_CHECKING:
    from gymsdk.configuration import Block, Deployment
    from gymsdk.launch import Options
    from gymsdk.servers.watching.logs import Logging
    from gymsdk.sitting import Budget
    from gymsdk.topology import Role
    from gymsdk.types import Model

__all__ = ["Order", "Player", "Shown", "Where", "serve_until_stopped"]

OVERRIDES = "GYMSDK_OVERRIDES"
"""The environment variable by which a supervisor hands the settings of its command on to its servers."""

PAIRS = ("--set", "--pin", "--server-port")
"""Options whose values are written like settings."""

log = logs.getLogger("gymsdk")

STEPS = ("--separate", "--json", "--open", "--launch-vllm")
"""Options that are the supervisor's alone."""


@dataclass(frozen=True, slots=True)
class Player:
    """Who plays, as far as the command says."""

    name: str | None
    base_urls: tuple[str, ...]
    api: Api | None
    pins: tuple[str, ...]
    token_ids: bool
    timeout: float
    launch: bool
    flags: tuple[str, ...]

    def check(self) -> None:
        """Refuse what does not go together; raises `UsageError`."""
        if self.flags and not self.launch:
            raise UsageError(f"{self.flags[0]} stands behind --, where flags for vLLM do; add --launch-vllm")
        if not self.launch:
            return
        if not self.name or not self.name.startswith("vllm/") or "@http" in self.name:
            raise UsageError("--launch-vllm starts the model that --model names, as in --model vllm/Qwen/Qwen3-4B")
        if self.base_urls:
            raise UsageError("--launch-vllm starts a server of its own, and --base-url names another; leave one out")

    def built(self, **more: Any) -> Model | None:
        """Give the model, `None` where the command names none."""
        from gymsdk.models import registry as models

        if self.name is None:
            if self.base_urls or self.pins or self.token_ids:
                raise UsageError("--base-url, --pin and --token-ids say how a model is asked; name it with --model")
            return None
        how: dict[str, Any] = {"api": self.api, "timeout": self.timeout, "pinned": given.pinned(self.pins)}
        address = given.addresses(self.base_urls)
        return models.model(self.name, **{"base_url": address, "tokens": self.token_ids, **how, **more})


@dataclass(frozen=True, slots=True)
class Where:
    """Which servers run here, and where they listen."""

    host: str | None
    advertise_host: str | None
    port: int | None
    ports: Mapping[str, int]
    head: str | None
    role: Role | None
    separate: bool
    only: str | None
    file: int | None
    root_path: str


@dataclass(frozen=True, slots=True)
class Order:
    """All that the command says; what it leaves open, the files may say."""

    names: tuple[str, ...]
    settings: Mapping[str, Mapping[str, Any]]
    files: tuple[Path, ...]
    overrides: tuple[str, ...]
    player: Player
    where: Where
    token_file: Path | None
    insecure: bool
    tls: tuple[Path, Path] | None
    limits: Mapping[str, int]
    budget: Budget
    ttl: float
    sessions: int
    mcp: bool
    logs: Mapping[str, Any]
    profile: Path | None

    def deployment(self) -> Deployment | None:
        """Give what the files and settings say, `None` where there are none; raises `UsageError`."""
        if not self.files and not self.overrides:
            return None
        from gymsdk import configuration
        from gymsdk.plugins.registry import installed

        found = configuration.read(self.files, self.overrides)
        configuration.check_environments(found, installed())
        if self.where.port is None:
            return found
        return found.model_copy(update={"head": found.head.model_copy(update={"port": self.where.port})})

    def options(self, deployment: Deployment | None) -> Options:
        """Give how it is to be served; what the command says goes before what the files do."""
        from gymsdk.configuration import Deployment
        from gymsdk.launch import HEAD, Options
        from gymsdk.servers.door.safety import Limits, Tls

        said, where = deployment or Deployment(), self.where
        tls = self.tls or ((said.tls.certificate, said.tls.key) if said.tls else None)
        port = where.port if where.port is not None else said.head.port if said.head.given else HEAD
        return Options(
            host=where.host or said.default_host,
            port=port,
            ports=dict(where.ports),
            advertise_host=where.advertise_host or said.advertise_host,
            insecure=self.insecure or said.insecure,
            token_file=self.token_file or said.token_file,
            tls=Tls(certificate=tls[0], key=tls[1]) if tls else None,
            limits=Limits(**self.limits),
            ttl=self.ttl,
            sessions=self.sessions,
            mcp=self.mcp,
            budget=self.budget,
            role="head" if where.only == "head_server" else where.role,
            only=None if where.only == "head_server" else where.only,
            head=where.head.rstrip("/") if where.head else None,
            sockets=self._sockets(),
            range=(said.ports.low, said.ports.high) if said.ports.low and said.ports.high else None,
            disallowed=said.ports.disallowed,
            root_path=where.root_path,
        )

    def _sockets(self) -> dict[str, socket.socket]:
        where = self.where
        if where.file is None:
            return {}
        if where.only is None:
            raise UsageError("--fd hands a socket to the server that --only names; leave both to --separate")
        return {where.only: _handed(where.file)}

    def logging(self, deployment: Deployment | None) -> Logging:
        """Give what is to be logged."""
        from gymsdk.servers.watching.logs import asked

        said = deployment.logs if deployment else None
        level = self.logs["level"] or (said.level if said else "warning")
        form = self.logs["format"] or (said.format if said else "text")
        folder = self.logs["directory"] or (said.folder if said else None)
        server = "head" if self.where.only == "head_server" else self.where.only or "gymsdk"
        return asked(level, form, folder, server=server)


def _handed(file: int) -> socket.socket:
    """Give the socket that is open under a number; raises `UsageError` where none is that listens."""
    try:
        at = socket.socket(fileno=file)
        if at.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            # What a server starts in its turn is not to keep its port.
            os.set_inheritable(file, False)
            return at
        at.detach()
    except OSError:
        pass
    raise UsageError(f"--fd {file}: no socket that listens is open under that number; leave --fd to --separate")


def serve_until_stopped(order: Order, shown: Shown) -> None:
    """Serve as *order* says until a signal comes."""
    from gymsdk.cli.running import warnings
    from gymsdk.cli.stopping import Stopped, until_stopped
    from gymsdk.servers.watching.logs import kept
    from gymsdk.servers.watching.profiling import profiled

    order.player.check()
    deployment = order.deployment()
    if deployment is not None and order.where.only is None:
        for note in (*deployment.notes, deployment.reported):
            if note:
                typer.echo(note, err=True)
    logging = order.logging(deployment)
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

    if order.where.file is not None:
        lifeline.held()
    try:
        async with _playing(order, deployment) as (model, words, variables):
            if order.where.separate:
                await _apart(order, deployment, logging, shown, (words, variables))
            else:
                await _together(order, deployment, model, shown)
    finally:
        await http.aclose()


@asynccontextmanager
async def _playing(
    order: Order, deployment: Deployment | None
) -> AsyncIterator[tuple[Model | None, list[str], dict[str, str]]]:
    """Give who plays, and the words and variables by which another process has the same play."""
    if not order.player.launch:
        yield order.player.built(), [], {}
        return
    from gymsdk.engine import Launch, launched
    from gymsdk.settings import VARIABLES

    name = (order.player.name or "").removeprefix("vllm/")
    seconds = deployment.readiness if deployment and deployment.readiness else 600.0
    launch = Launch(name=name, flags=order.player.flags, insecure=order.insecure, ending=5.0, starting=seconds)
    async with launched(launch) as engine:
        key = {VARIABLES["policy_api_key"]: engine.key.get_secret_value()} if engine.key else {}
        yield order.player.built(base_url=engine.url, api_key=engine.key), ["--base-url", engine.url], key


async def _together(order: Order, deployment: Deployment | None, model: Model | None, shown: Shown) -> None:
    from gymsdk.launch import serving

    with TemporaryDirectory(prefix="gymsdk-") as folder:
        async with serving(
            order.names, model=model, settings=order.settings, options=order.options(deployment), deployment=deployment
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
    passed: tuple[list[str], dict[str, str]],
) -> None:
    from gymsdk.launch import placed, planned, running_here
    from gymsdk.separate import separated

    options = order.options(deployment)
    safety = options.safety()
    options = await placed(options, deployment, safety)
    blocks = planned(order.names, order.player.name, order.settings, options, deployment)
    here = running_here(blocks, options, safety)
    words = [*_again(sys.argv[1:], order.overrides), *passed[0], *_default(order, deployment, options)]
    # A setting may be a key, and what a process is started by, everybody on its machine can read.
    variables = passed[1] | {OVERRIDES: json.dumps(order.overrides)}
    bare = logging.takes_stderr and logging.format == "json"
    async with separated(here, words, options=options, safety=safety, environment=variables, bare=bare) as running:
        await shown(running.head_url, running.services, _played(blocks), None, ())
        await running.ended()


def _played(blocks: Sequence[Block]) -> str:
    """Who plays behind the policy's model server, where there is one."""
    from gymsdk.configuration import Player as Named

    parts = [each.part for each in blocks if each.kind == "responses_api_models"]
    return parts[0].name if parts and isinstance(parts[0], Named) else ""


def _default(order: Order, deployment: Deployment | None, options: Options) -> list[str]:
    """The words that say who plays where nobody did: one that has a head elsewhere would leave it to other nodes."""
    from gymsdk.launch import DEFAULT

    apart = order.player.name or deployment is not None or options.head or options.role
    return [] if apart else ["--model", DEFAULT]


def handed_overrides() -> tuple[str, ...]:
    """Give the settings that the supervisor of this process has handed on."""
    return tuple(json.loads(os.environ.get(OVERRIDES) or "[]"))


def _again(words: list[str], overrides: Sequence[str]) -> list[str]:
    """Give the *words* of the command by which one of its servers is started: without what is the supervisor's.

    The settings among them, *overrides*, are handed on otherwise.
    """
    kept = words[: words.index("--")] if "--" in words else list(words)
    pairs = zip(["", *kept], kept, strict=False)
    kept = [word for before, word in pairs if word not in overrides or before in PAIRS]
    kept = [word for word in kept if word not in STEPS]
    return _without(_without(kept, "--head"), "--port")


def _without(words: list[str], option: str) -> list[str]:
    kept: list[str] = []
    rest = iter(words)
    for word in rest:
        if word == option:
            next(rest, None)
        elif not word.startswith(f"{option}="):
            kept.append(word)
    return kept
