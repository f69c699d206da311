"""An order: what the command `gymsdk serve` says, and made one with what the files say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gymsdk.cli import options as given
from gymsdk.deploy import supervisor as handing
from gymsdk.errors import UsageError
from gymsdk.responses import Api

if TYPE_CHECKING:
    import socket

    from gymsdk.config.model import Deployment
    from gymsdk.deploy.plan import Options, Role
    from gymsdk.episode import Budget
    from gymsdk.observability.logging import LogConfig
    from gymsdk.types import Model


RAY_ADDRESS_KEY = "ray_head_node_address"
"""NeMo Gym's key for a Ray cluster, which is not used here."""


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Who plays, as far as the command says."""

    name: str | None
    base_urls: tuple[str, ...]
    api: Api | None
    pins: tuple[str, ...]
    token_ids: bool
    timeout: float
    launch: bool
    flags: tuple[str, ...]
    key: str | None = None

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

    def build_model(self, **more: Any) -> Model | None:
        """Give the model, `None` where the command names none."""
        from gymsdk.models import registry as models

        if self.name is None:
            if self.base_urls or self.pins or self.token_ids:
                raise UsageError("--base-url, --pin and --token-ids say how a model is asked; name it with --model")
            return None
        how: dict[str, Any] = {"api": self.api, "timeout": self.timeout, "pinned": given.parse_pins(self.pins)}
        how |= {"api_key": self.key} if self.key else {}
        address = given.join_base_urls(self.base_urls)
        return models.model(self.name, **{"base_url": address, "tokens": self.token_ids, **how, **more})


@dataclass(frozen=True, slots=True)
class ListenOptions:
    """Which servers run here, and where they listen."""

    host: str | None
    advertise_host: str | None
    port: int | None
    ports: Mapping[str, int]
    head: str | None
    role: Role | None
    separate: bool
    only: str | None
    socket_fd: int | None
    root_path: str
    supervisor: str = ""


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """All that the command says, and the files may say what it leaves open; *settings* are the *pairs* of `--set`."""

    names: tuple[str, ...]
    settings: Mapping[str, Mapping[str, Any]]
    pairs: tuple[str, ...]
    files: tuple[Path, ...]
    overrides: tuple[str, ...]
    player: ModelOptions
    where: ListenOptions
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
    capture: Path | None

    def read_deployment(self) -> Deployment | None:
        """Give what the files and settings say, `None` where there are none; raises `UsageError`.

        The folder's `env.yaml` is such a file: a server does not begin without the token that stands there.
        """
        from gymsdk.models.options import ENV_FILES

        if not self.files and not self.overrides and not any(Path(each).exists() for each in ENV_FILES):
            return None
        from gymsdk import config
        from gymsdk.deploy import plan, validate

        where = self.where
        found = config.load_config(self.files, self.overrides, played=self.player.name is not None)
        role = "head" if where.only == handing.HEAD else where.role
        validate.check(found, plan.here(found.servers, role=role, only=where.only))
        if not (found.servers or self.names or self.player.name or found.head.given or where.role or where.head):
            if RAY_ADDRESS_KEY not in found.ignored:
                files = ", ".join(map(str, self.files)) or "the settings"
                raise UsageError(
                    f"no server is named in {files}; `gymsdk config NAME` writes a file that serves an environment"
                )
            # Whoever names a cluster and nothing else starts its first node, which others join.
            found = found.model_copy(update={"head": found.head.model_copy(update={"given": True})})
        if where.port is None:
            return found
        return found.model_copy(update={"head": found.head.model_copy(update={"port": self.where.port})})

    def list_warnings(self, deployment: Deployment | None) -> Iterator[str]:
        """Yield what somebody should read before it is served; what is started by a supervisor has nothing to add."""
        if self.where.only is not None:
            return
        from gymsdk.config.redaction import format_exposure_warning, is_secret

        keys = [pair.partition("=")[0] for pair in self.pairs]
        yield from (
            format_exposure_warning(f"--set {key}", "a file of --config")
            for key in keys
            if is_secret((key.rpartition(".")[2],))
        )
        if deployment is not None:
            yield from filter(None, (*deployment.notes, deployment.ignored_keys_note))

    def build_options(self, deployment: Deployment | None) -> Options:
        """Give how it is to be served; what the command says goes before what the files do."""
        from gymsdk.config.model import Deployment
        from gymsdk.deploy.plan import Options
        from gymsdk.deploy.process import HEAD
        from gymsdk.servers.auth import Limits, Tls

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
            role="head" if where.only == handing.HEAD else where.role,
            only=None if where.only == handing.HEAD else where.only,
            head=where.head.rstrip("/") if where.head else None,
            sockets=self._sockets(),
            range=(said.ports.low, said.ports.high) if said.ports.low and said.ports.high else None,
            disallowed=said.ports.disallowed,
            root_path=where.root_path,
            supervisor=where.supervisor,
            capture=self.capture or said.capture,
        )

    def _sockets(self) -> dict[str, socket.socket]:
        where = self.where
        if where.socket_fd is None:
            return {}
        if where.only is None:
            raise UsageError("--fd hands a socket to the server that --only names; leave both to --separate")
        return {where.only: handing.socket_at(where.socket_fd)}

    def build_logging(self, deployment: Deployment | None) -> LogConfig:
        """Give what is to be logged."""
        from gymsdk.observability.logging import parse_log_config

        said = deployment.logs if deployment else None
        level = self.logs["level"] or (said.level if said else "warning")
        form = self.logs["format"] or (said.format if said else "text")
        folder = self.logs["directory"] or (said.folder if said else None)
        server = "head" if self.where.only == handing.HEAD else self.where.only or "gymsdk"
        return parse_log_config(level, form, folder, server=server)
