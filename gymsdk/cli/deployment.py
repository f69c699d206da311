"""Combine the options of `gymsdk serve` with configuration files, start the model and the servers, and serve."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from pydantic import BaseModel, ConfigDict, Field

from gymsdk.cli.options import join_base_urls, parse_pins
from gymsdk.cli.serve import Announcer
from gymsdk.deploy import child
from gymsdk.deploy.plan import Role
from gymsdk.episode import Budget
from gymsdk.errors import UsageError
from gymsdk.responses import Api

if TYPE_CHECKING:
    import socket

    from gymsdk.config.model import Deployment, ServerConfig
    from gymsdk.deploy.plan import Options
    from gymsdk.observability.logging import LogConfig
    from gymsdk.types import Model

log = logging.getLogger("gymsdk")

RAY_ADDRESS_KEY = "ray_head_node_address"
"""NeMo Gym's key for the address of a Ray cluster. gymsdk does not use it."""


class _Options(BaseModel):
    """Options that a server in its own process receives as JSON; errors must not show them, because of the secrets."""

    model_config = ConfigDict(frozen=True, hide_input_in_errors=True, ser_json_inf_nan="constants")


class ModelOptions(_Options):
    """The options of the command that describe the policy's model.

    Attributes:
        pins: The values of `--pin`.
        launch: Whether to start vLLM with the model.
        flags: The flags for vLLM.
        key: The API key of a vLLM that the supervisor started.
    """

    name: str | None
    base_urls: tuple[str, ...]
    api: Api | None = None
    pins: tuple[str, ...] = ()
    token_ids: bool = False
    timeout: float
    launch: bool = False
    flags: tuple[str, ...] = ()
    key: str | None = Field(default=None, repr=False)

    def check(self) -> None:
        """Raise `UsageError` if options contradict each other."""
        if self.flags and not self.launch:
            raise UsageError(f"{self.flags[0]} stands after --, where flags for vLLM belong; add --launch-vllm")
        if not self.launch:
            return
        if not self.name or not self.name.startswith("vllm/") or "@http" in self.name:
            raise UsageError("--launch-vllm needs a model from --model, as in --model vllm/Qwen/Qwen3-4B")
        if self.base_urls:
            raise UsageError(
                "--launch-vllm starts a model server, and --base-url names another one; leave one of them out"
            )

    def build_model(self) -> Model | None:
        """Build the model, or return `None` if the command names none."""
        from gymsdk.models import registry as models

        if self.name is None:
            if self.base_urls or self.pins or self.token_ids:
                raise UsageError("--base-url, --pin and --token-ids configure a model; name the model with --model")
            return None
        keywords: dict[str, Any] = {"api_key": self.key} if self.key else {}
        return models.model(
            self.name,
            base_url=join_base_urls(self.base_urls),
            tokens=self.token_ids,
            api=self.api,
            timeout=self.timeout,
            pinned=parse_pins(self.pins),
            **keywords,
        )


class ListenOptions(_Options):
    """The options of the command that say which servers run here, and where they listen.

    Attributes:
        ports: The ports of servers other than the head, by server.
        head: The URL of a head on another node, or `None` to run the head here.
        only: The only server to run in this process, on the socket *socket_fd* from the supervisor.
        supervisor: The id of the supervisor that started this process.
    """

    host: str | None
    advertise_host: str | None
    port: int | None
    ports: Mapping[str, int]
    head: str | None
    role: Role | None
    separate: bool
    only: str | None = None
    socket_fd: int | None = None
    root_path: str
    supervisor: str = ""


class LogOptions(_Options):
    """The options of the command that describe the logs."""

    level: str | None
    format: str | None
    directory: Path | None


class ServeOptions(_Options):
    """All options of the command. Configuration files may supply what these leave open.

    Attributes:
        settings: The settings of each environment.
        setting_pairs: The same settings as words of `--set`.
        max_output: The maximum length of one tool output. It is no part of a budget's JSON.
    """

    names: tuple[str, ...]
    settings: Mapping[str, Mapping[str, Any]]
    setting_pairs: tuple[str, ...]
    files: tuple[Path, ...]
    overrides: tuple[str, ...]
    model: ModelOptions
    listen: ListenOptions
    token_file: Path | None
    insecure: bool
    tls: tuple[Path, Path] | None
    limits: Mapping[str, int]
    budget: Budget
    max_output: int | None
    ttl: float
    sessions: int
    mcp: bool
    logs: LogOptions
    profile: Path | None
    capture: Path | None

    def read_deployment(self) -> Deployment | None:
        """Read the configuration files and overrides.

        The working folder's `env.yaml` counts as such a file, so that a server does not start without the token in it.

        Returns:
            The deployment, or `None` if there are no files and no overrides.

        Raises:
            UsageError: The files name no server.
            BadConfig: A setting is wrong.
        """
        from gymsdk.models.options import ENV_FILES

        if not self.files and not self.overrides and not any(Path(file).exists() for file in ENV_FILES):
            return None
        from gymsdk.config.read import load_config
        from gymsdk.deploy import plan

        listen = self.listen
        deployment = load_config(self.files, self.overrides, played=self.model.name is not None)
        role = "head" if listen.only == child.HEAD_SERVER else listen.role
        plan.check_deployment(deployment, plan.select_local(deployment.servers, role=role, only=listen.only))
        if not (
            deployment.servers or self.names or self.model.name or deployment.head.given or listen.role or listen.head
        ):
            if RAY_ADDRESS_KEY not in deployment.ignored:
                files = ", ".join(map(str, self.files)) or "the settings"
                raise UsageError(
                    f"{files} names no server; `gymsdk config NAME` writes a file that serves an environment"
                )
            # A file that only names a cluster starts its first node, which others join.
            deployment = deployment.model_copy(update={"head": deployment.head.model_copy(update={"given": True})})
        if listen.port is None:
            return deployment
        return deployment.model_copy(update={"head": deployment.head.model_copy(update={"port": self.listen.port})})

    def list_warnings(self, deployment: Deployment | None) -> Iterator[str]:
        """Yield warnings to print before serving. A server that a supervisor starts has none."""
        if self.listen.only is not None:
            return
        from gymsdk.config.show import format_exposure_warning, is_secret

        keys = [pair.partition("=")[0] for pair in self.setting_pairs]
        yield from (
            format_exposure_warning(f"--set {key}", "a file of --config")
            for key in keys
            if is_secret((key.rpartition(".")[2],))
        )
        if deployment is not None:
            yield from filter(None, (*deployment.notes, deployment.ignored_keys_note))

    def build_options(self, deployment: Deployment | None) -> Options:
        """Build the options of the servers. Options of the command take precedence over the files."""
        from gymsdk.config.model import Deployment
        from gymsdk.deploy.plan import Options
        from gymsdk.deploy.process import HEAD
        from gymsdk.servers.auth import Limits, Tls

        config, listen = deployment or Deployment(), self.listen
        output = {} if self.max_output is None else {"output": self.max_output}
        tls = self.tls or ((config.tls.certificate, config.tls.key) if config.tls else None)
        port = listen.port if listen.port is not None else config.head.port if config.head.given else HEAD
        return Options(
            host=listen.host or config.default_host,
            port=port,
            ports=dict(listen.ports),
            advertise_host=listen.advertise_host or config.advertise_host,
            insecure=self.insecure or config.insecure,
            token_file=self.token_file or config.token_file,
            tls=Tls(certificate=tls[0], key=tls[1]) if tls else None,
            limits=Limits(**self.limits),
            ttl=self.ttl,
            sessions=self.sessions,
            mcp=self.mcp,
            budget=self.budget.model_copy(update=output),
            role="head" if listen.only == child.HEAD_SERVER else listen.role,
            only=None if listen.only == child.HEAD_SERVER else listen.only,
            head=listen.head.rstrip("/") if listen.head else None,
            sockets=self._sockets(),
            range=(config.ports.low, config.ports.high) if config.ports.low and config.ports.high else None,
            disallowed=config.ports.disallowed,
            root_path=listen.root_path,
            supervisor=listen.supervisor,
            capture=self.capture or config.capture,
        )

    def _sockets(self) -> dict[str, socket.socket]:
        listen = self.listen
        if listen.socket_fd is None:
            return {}
        if listen.only is None:
            raise UsageError("--fd passes a socket to the server that --only names; --separate sets both")
        return {listen.only: child.open_socket(listen.socket_fd)}

    def build_child_settings(self, only: str, socket_fd: int, head: str | None) -> bytes:
        """Return the line with the options of the server *only* in its own process, for its standard input."""
        update = {"only": only, "socket_fd": socket_fd, "head": head, "port": None, "separate": False}
        listen = self.listen.model_copy(update=update)
        settings = self.model_copy(update={"listen": listen}).model_dump(mode="json")
        # In ASCII, because UTF-8 cannot express the bytes of a file name that are not UTF-8.
        return json.dumps(settings).encode() + b"\n"

    def build_logging(self, deployment: Deployment | None) -> LogConfig:
        """Return the configuration of the logs."""
        from gymsdk.observability.logging import parse_log_config

        logs = deployment.logs if deployment else None
        level = self.logs.level or (logs.level if logs else "warning")
        log_format = self.logs.format or (logs.format if logs else "text")
        folder = self.logs.directory or (logs.folder if logs else None)
        server = "head" if self.listen.only == child.HEAD_SERVER else self.listen.only or "gymsdk"
        return parse_log_config(level, log_format, folder, server=server)


def serve_until_stopped(options: ServeOptions, announce: Announcer) -> None:
    """Serve until a signal arrives.

    Args:
        options: The options of the command.
        announce: Prints the addresses once the servers are ready.
    """
    from gymsdk.cli.process import Stopped, run_until_signal
    from gymsdk.cli.progress import show_warnings
    from gymsdk.observability.logging import log_to
    from gymsdk.tracing import profile_to_directory

    options.model.check()
    deployment = options.read_deployment()
    for warning in options.list_warnings(deployment):
        typer.echo(warning, err=True)
    log_config = options.build_logging(deployment)
    profile = options.profile or (deployment.profile if deployment else None)
    warnings = nullcontext() if log_config.takes_stderr else show_warnings()
    try:
        # The output of an environment's code must not mix with the JSON line for programs.
        with warnings, log_to(log_config), profile_to_directory(profile), redirect_stdout(sys.stderr):
            work = _serve_deployment(options, deployment, log_config, announce)
            run_until_signal(work, quiet=options.listen.only is not None)
    except Stopped as stop:
        # Ctrl-C is the regular way to stop a server, so the exit code is 0 once it has been ready.
        raise typer.Exit(0 if announce.ready else stop.code) from None


async def _serve_deployment(
    options: ServeOptions, deployment: Deployment | None, log_config: LogConfig, announce: Announcer
) -> None:
    from gymsdk.deploy import process_guard
    from gymsdk.http import client

    if options.listen.socket_fd is not None and not process_guard.IS_AVAILABLE:
        process_guard.watch_parent()
    try:
        async with _start_engine(options.model, options.insecure, deployment) as model:
            # Built here for separate servers too: a wrong option is reported once, before any process starts.
            built = model.build_model()
            if options.listen.separate:
                await _serve_separately(options.model_copy(update={"model": model}), deployment, log_config, announce)
            else:
                await _serve_in_process(options, deployment, built, announce)
    finally:
        await client.aclose()


@asynccontextmanager
async def _start_engine(
    model: ModelOptions, insecure: bool, deployment: Deployment | None
) -> AsyncIterator[ModelOptions]:
    """Yield the options of the policy's model. With --launch-vllm, run vLLM as long as the context is open."""
    if not model.launch:
        yield model
        return
    from gymsdk.deploy.vllm import launch_vllm
    from gymsdk.deploy.vllm_command import Launch

    name = (model.name or "").removeprefix("vllm/")
    start_seconds = deployment.readiness if deployment and deployment.readiness else 600.0
    launch = Launch(name=name, flags=model.flags, insecure=insecure, ending=5.0, starting=start_seconds)
    async with launch_vllm(launch) as engine:
        key = engine.key.get_secret_value() if engine.key else None
        yield model.model_copy(update={"base_urls": (engine.url,), "key": key, "launch": False, "flags": ()})


async def _serve_in_process(
    options: ServeOptions, deployment: Deployment | None, model: Model | None, announce: Announcer
) -> None:
    from gymsdk.cli.process import open_scratch_folder
    from gymsdk.deploy.process import serve

    with open_scratch_folder() if announce.tries else nullcontext() as folder:
        async with serve(
            options.names,
            model=model,
            settings=options.settings,
            options=options.build_options(deployment),
            deployment=deployment,
        ) as running:
            if options.listen.only is None:
                policy = options.model.name or running.model
                await announce(running.head_url, running.services, policy, folder, running.environments)
            announce.ready = True
            check = asyncio.ensure_future(_warn_if_engine_is_down(running.model, options.listen.only))
            try:
                await running.wait_for_end()
            finally:
                check.cancel()


async def _warn_if_engine_is_down(model: Model | None, only: str | None) -> None:
    """Warn if the engine behind the policy's model server does not answer yet; the servers are ready without it."""
    from gymsdk.config.model import POLICY_SERVER

    find_trouble = getattr(model, "trouble", None)
    if find_trouble is not None and only in {None, POLICY_SERVER} and (trouble := await find_trouble()):
        log.warning("%s", trouble)


async def _serve_separately(
    options: ServeOptions, deployment: Deployment | None, log_config: LogConfig, announce: Announcer
) -> None:
    from gymsdk.deploy.process import DEFAULT, leaves_model_to_others, plan_servers, resolve_head, select_servers_here
    from gymsdk.deploy.separate import serve_separately

    listen = options.listen.model_copy(update={"supervisor": secrets.token_hex(8)})
    options = options.model_copy(update={"listen": listen})
    plan = options.build_options(deployment)
    safety = plan.get_security()
    plan = await resolve_head(plan, deployment, safety)
    blocks = plan_servers(options.names, options.model.name, options.settings, plan, deployment)
    local_servers = select_servers_here(blocks, plan, safety)
    # A node whose head runs elsewhere starts no default model.
    if not (options.model.name or leaves_model_to_others(deployment) or plan.head or plan.role):
        options = options.model_copy(update={"model": options.model.model_copy(update={"name": DEFAULT})})
    prefix_lines = not (log_config.takes_stderr and log_config.format == "json")
    async with serve_separately(
        local_servers, options.build_child_settings, options=plan, security=safety, prefix_lines=prefix_lines
    ) as running:
        await announce(running.head_url, running.services, _find_served_policy(blocks), None, ())
        await running.wait_for_end()


def _find_served_policy(blocks: Sequence[ServerConfig]) -> str:
    """Return the name of the model behind the policy's model server, or an empty string if there is none."""
    from gymsdk.config.model import ModelServerConfig

    parts = [block.part for block in blocks if block.kind == "responses_api_models"]
    return parts[0].name if parts and isinstance(parts[0], ModelServerConfig) else ""
