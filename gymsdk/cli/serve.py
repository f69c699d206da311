"""`gymsdk serve`: environments behind HTTP, for trainers and everything that speaks to NeMo Gym."""

from __future__ import annotations

import asyncio
import logging as logs
import re
import secrets
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from gymsdk import credentials
from gymsdk.cli import options
from gymsdk.cli.announce import Announcer
from gymsdk.cli.deployment import ServeOptions
from gymsdk.deploy import supervisor
from gymsdk.errors import UsageError

WHAT, SAFE, WATCH, WHERE = "What is served", "Who may ask", "What is told", "Where"
"""The headings of the options."""


def serve(  # noqa: PLR0913  # each is an option of the command
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME | KEY=VALUE...] [-- FLAGS]",
            help="Environments, settings that win over the files', and behind -- flags for vllm serve.",
            show_default=False,
        ),
    ] = None,
    *,
    config: Annotated[
        list[Path],
        typer.Option("--config", metavar="FILE", help="A configuration; later ones win.", show_default=False),
    ] = [],  # noqa: B006  # typer copies it
    model: options.OptionalModelName = None,
    base_url: options.BaseUrl = [],  # noqa: B006  # typer copies it
    api: options.Api = None,
    pin: options.Pin = [],  # noqa: B006  # typer copies it
    token_ids: options.TokenIds = False,
    timeout: options.Timeout = 300.0,
    launch_vllm: Annotated[
        bool, typer.Option("--launch-vllm", help="Start vLLM here with the model; flags for it stand behind --.")
    ] = False,
    settings: options.Settings = [],  # noqa: B006  # typer copies it
    separate: Annotated[bool, typer.Option("--separate", help="Have a supervised process for each server.")] = False,
    role: Annotated[
        Literal["head", "resources", "agent", "model"] | None, typer.Option(help="Serve these alone.")
    ] = None,
    head: Annotated[
        str | None, typer.Option(metavar="URL", help="The head of other nodes to be known to, in place of one here.")
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(metavar="HOST", help="Where to listen; beyond loopback with a token.", show_default="127.0.0.1"),
    ] = None,
    advertise_host: Annotated[
        str | None, typer.Option(metavar="HOST", help="Where others reach what listens here.", show_default="the host")
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, metavar="N", help="The head's port; 0 is any.", show_default="11000"),
    ] = None,
    server_port: Annotated[
        list[str],
        typer.Option(metavar="SERVER=N", help="The port of another server; any, if not given.", show_default=False),
    ] = [],  # noqa: B006  # typer copies it
    token_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Ask everybody for the token in it.", show_default="GYMSDK_TOKEN_FILE"),
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Let anybody who reaches the host use them.")] = False,
    tls_cert: Annotated[Path | None, typer.Option(metavar="FILE", help="Speak TLS, with this certificate.")] = None,
    tls_key: Annotated[Path | None, typer.Option(metavar="FILE", help="The certificate's key.")] = None,
    root_path: Annotated[
        str,
        typer.Option(
            metavar="PATH", help="Where a proxy shows the head; the others are at PATH/SERVER.", show_default=False
        ),
    ] = "",
    max_body: Annotated[
        int | None, typer.Option(min=1024, metavar="BYTES", help="What a request may have.", show_default="256 MiB")
    ] = None,
    max_bodies: Annotated[
        int | None,
        typer.Option(
            min=1024,
            metavar="BYTES",
            help="Memory that all large requests may take together.",
            show_default="a quarter of the memory",
        ),
    ] = None,
    max_connections: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Connections to one server.", show_default="20000")
    ] = None,
    max_output: Annotated[
        int | None, typer.Option(min=1, metavar="CHARS", help="What a tool may put out.", show_default="4 Mi")
    ] = None,
    turns: options.Turns = 32,
    tool_calls: options.ToolCalls = 128,
    deadline: options.Deadline = 600.0,
    ttl: Annotated[
        float,
        typer.Option(
            min=1, metavar="SECONDS", callback=options.check_finite, help="How long an unused session is kept."
        ),
    ] = 3600.0,
    sessions: Annotated[
        int, typer.Option(min=1, metavar="N", help="Sessions of an environment that may be open.")
    ] = 10_000,
    mcp: Annotated[bool, typer.Option("--mcp", help="Offer the tools at /mcp too.")] = False,
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"] | None,
        typer.Option(help="What is logged; from info on, a line for each request.", show_default="warning"),
    ] = None,
    log_format: Annotated[Literal["text", "json"] | None, typer.Option(help="How.", show_default="text")] = None,
    log_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="A file for each server; standard error, if not given."),
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Tell CPU time by hook and route at /stats, and here at the end.")
    ] = None,
    capture_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Capture the model calls of each rollout there, as NeMo Gym does."),
    ] = None,
    tries: Annotated[bool, typer.Option("--open", help="Print curl lines to try.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one line of JSON when ready.")] = False,
    only: Annotated[str | None, typer.Option(hidden=True)] = None,
    file: Annotated[int | None, typer.Option("--fd", hidden=True)] = None,
) -> None:
    """Serve environments over HTTP until Ctrl-C, as NeMo Gym's clients expect them."""
    from gymsdk.cli.announce import Announcer
    from gymsdk.cli.deployment import ListenOptions, ModelOptions, ServeOptions
    from gymsdk.deploy import supervisor, validate
    from gymsdk.episode import Budget

    names, overrides, flags = _split_words(words or [])
    validate.check_names(names)
    handed = supervisor.Handed()
    if only is not None and file is not None:
        handed = supervisor.taken(file)
        overrides, settings = (*handed.overrides, *overrides), [*handed.settings, *settings]
        model, pin, base_url = model or handed.model, [*handed.pins, *pin], [*handed.base_urls, *base_url]
    if not names and not config and not overrides and role not in {"head", "model"}:
        raise UsageError("name what to serve: an environment, as in gymsdk serve math, or a file with --config")
    _check_listen_options(role, head, advertise_host)
    limits = {"body": max_body, "bodies": max_bodies, "connections": max_connections}
    budget = Budget(turns=turns, tools=tool_calls, seconds=deadline)
    order = ServeOptions(
        names=names,
        settings=options.parse_settings(names, settings),
        pairs=tuple(settings),
        files=tuple(config),
        overrides=overrides,
        player=ModelOptions(
            model, tuple(base_url), api, tuple(pin), token_ids, timeout, launch_vllm, flags, handed.key
        ),
        where=ListenOptions(
            host,
            advertise_host,
            port,
            dict(map(_parse_server_port, server_port)),
            head,
            role,
            separate,
            only,
            file,
            root_path,
            handed.supervisor,
        ),
        token_file=token_file,
        insecure=insecure,
        tls=_check_tls(tls_cert, tls_key),
        limits={key: value for key, value in limits.items() if value is not None},
        budget=budget if max_output is None else budget.model_copy(update={"output": max_output}),
        ttl=ttl,
        sessions=sessions,
        mcp=mcp,
        logs={"level": log_level, "format": log_format, "directory": log_dir},
        profile=profile,
        capture=capture_dir,
    )
    serve_until_stopped(order, Announcer(json=json, tries=tries))


def _split_words(words: list[str]) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Give the environments, the settings, and the flags for vLLM among *words*."""
    at = next((number for number, word in enumerate(words) if word.startswith("-")), len(words))
    settings = tuple(word for word in words[:at] if "=" in word or word.startswith(("+", "~")))
    return tuple(word for word in words[:at] if word not in settings), settings, tuple(words[at:])


def _parse_server_port(pair: str) -> tuple[str, int]:
    name, equals, port = pair.rpartition("=")
    if not equals or not name or not re.fullmatch("[0-9]{1,5}", port) or int(port) > 65535:  # noqa: PLR2004  # the last
        raise UsageError(f"--server-port {pair}: write it as SERVER=N, as in --server-port policy_model=11003")
    return name, int(port)


def _check_listen_options(role: str | None, head: str | None, advertise_host: str | None) -> None:
    """Refuse a head or a host that cannot be meant; raises `UsageError`."""
    if head is not None and "@" in head:
        credentials.check_head_url(head)
    if role == "head" and head is not None:
        raise UsageError("--role head is the head, and --head names another; leave one of them out")
    if head is not None and not re.fullmatch(r"https?://[^/\s]+/?", head):
        raise UsageError(f"--head {head.rpartition('@')[2]}: write it as http://HOST:PORT")
    if advertise_host is not None and not re.fullmatch(r"[\w.-]+|[0-9A-Fa-f:]+", advertise_host):
        raise UsageError(f"--advertise-host {advertise_host}: write a name or address alone, without http:// and port")


def _check_tls(certificate: Path | None, key: Path | None) -> tuple[Path, Path] | None:
    if certificate and key:
        return certificate, key
    if given := "--tls-cert" if certificate else "--tls-key" if key else None:
        other = "--tls-key" if certificate else "--tls-cert"
        raise UsageError(f"{given} is given without {other}; TLS needs both")
    return None


if TYPE_CHECKING:
    from gymsdk.config.model import Deployment, ServerConfig
    from gymsdk.deploy.plan import Options
    from gymsdk.observability.logging import LogConfig
    from gymsdk.types import Model

log = logs.getLogger("gymsdk")


def serve_until_stopped(order: ServeOptions, shown: Announcer) -> None:
    """Serve as *order* says until a signal comes."""
    from gymsdk.cli.rollout import show_warnings
    from gymsdk.cli.stopping import Stopped, run_until_signal
    from gymsdk.observability.logging import log_to
    from gymsdk.profiling import profile_to_directory

    order.player.check()
    deployment = order.read_deployment()
    for note in order.list_warnings(deployment):
        typer.echo(note, err=True)
    logging = order.build_logging(deployment)
    profile = order.profile or (deployment.profile if deployment else None)
    try:
        # What an author's code prints must not mix with what a program reads.
        told = nullcontext() if logging.takes_stderr else show_warnings()
        with told, log_to(logging), profile_to_directory(profile), redirect_stdout(sys.stderr):
            run_until_signal(_serve_deployment(order, deployment, logging, shown), quiet=order.where.only is not None)
    except Stopped as stop:
        # A server is there to be stopped: once it has been ready, that went well.
        raise typer.Exit(0 if shown.ready else stop.code) from None


async def _serve_deployment(
    order: ServeOptions, deployment: Deployment | None, logging: LogConfig, shown: Announcer
) -> None:
    from gymsdk.deploy import parent
    from gymsdk.http import client

    if order.where.socket_fd is not None:
        parent.held()
    try:
        async with _start_model(order, deployment) as playing:
            if order.where.separate:
                await _serve_separately(order, deployment, logging, shown, playing.inherited)
            else:
                await _serve_in_process(order, deployment, playing.model, shown)
    finally:
        await client.aclose()


@dataclass(frozen=True, slots=True)
class StartedModel:
    """Who plays, and what is *handed* down for another process to have the same play."""

    model: Model | None
    inherited: supervisor.Handed


@asynccontextmanager
async def _start_model(order: ServeOptions, deployment: Deployment | None) -> AsyncIterator[StartedModel]:
    """Give who plays: a model that is started here for as long as the context is open, where one is to be."""
    player = order.player
    handed = supervisor.Handed(
        overrides=order.overrides,
        settings=order.pairs,
        model=player.name,
        pins=player.pins,
        base_urls=player.base_urls,
        supervisor=secrets.token_hex(8),
    )
    if not player.launch:
        yield StartedModel(player.build_model(), handed)
        return
    from gymsdk.deploy.vllm import launched
    from gymsdk.deploy.vllm_command import Launch

    name = (player.name or "").removeprefix("vllm/")
    seconds = deployment.readiness if deployment and deployment.readiness else 600.0
    launch = Launch(name=name, flags=player.flags, insecure=order.insecure, ending=5.0, starting=seconds)
    async with launched(launch) as engine:
        key = engine.key.get_secret_value() if engine.key else None
        told = handed.model_copy(update={"base_urls": (engine.url,), "key": key})
        yield StartedModel(player.build_model(base_url=engine.url, api_key=engine.key), told)


async def _serve_in_process(
    order: ServeOptions, deployment: Deployment | None, model: Model | None, shown: Announcer
) -> None:
    from gymsdk.deploy.process import serving

    with TemporaryDirectory(prefix="gymsdk-") as folder:
        async with serving(
            order.names,
            model=model,
            settings=order.settings,
            options=order.build_options(deployment),
            deployment=deployment,
        ) as running:
            if order.where.only is None:
                player = order.player.name or running.model
                await shown(running.head_url, running.services, player, Path(folder), running.environments)
            shown.ready = True
            looking = asyncio.ensure_future(_warn_if_engine_is_down(running.model, order.where.only))
            try:
                await running.ended()
            finally:
                looking.cancel()


async def _warn_if_engine_is_down(model: Model | None, only: str | None) -> None:
    """Warn where the engine behind the policy's model server does not answer yet; the servers do."""
    from gymsdk.config.model import POLICY_SERVER

    trouble = getattr(model, "trouble", None)
    if trouble is not None and only in {None, POLICY_SERVER} and (words := await trouble()):
        log.warning("%s", words)


async def _serve_separately(
    order: ServeOptions,
    deployment: Deployment | None,
    logging: LogConfig,
    shown: Announcer,
    handed: supervisor.Handed,
) -> None:
    from gymsdk.deploy.process import placed, planned, running_here
    from gymsdk.deploy.separate import separated

    options = order.build_options(deployment).model_copy(update={"supervisor": handed.supervisor})
    safety = options.safety()
    options = await placed(options, deployment, safety)
    blocks = planned(order.names, order.player.name, order.settings, options, deployment)
    here = running_here(blocks, options, safety)
    words = [*supervisor.again(sys.argv[1:], order.overrides), *_build_default_words(order, deployment, options)]
    bare = logging.takes_stderr and logging.format == "json"
    async with separated(here, words, options=options, safety=safety, handed=handed.line(), bare=bare) as running:
        await shown(running.head_url, running.services, _find_served_policy(blocks), None, ())
        await running.ended()


def _find_served_policy(blocks: Sequence[ServerConfig]) -> str:
    """Who plays behind the policy's model server, where there is one."""
    from gymsdk.config.model import ModelServerConfig as Named

    parts = [each.part for each in blocks if each.kind == "responses_api_models"]
    return parts[0].name if parts and isinstance(parts[0], Named) else ""


def _build_default_words(order: ServeOptions, deployment: Deployment | None, options: Options) -> list[str]:
    """The words that say who plays where nobody did: one that has a head elsewhere would leave it to other nodes."""
    from gymsdk.deploy.process import DEFAULT, leaves_model

    apart = order.player.name or leaves_model(deployment) or options.head or options.role
    return [] if apart else ["--model", DEFAULT]
