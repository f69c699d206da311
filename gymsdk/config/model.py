"""The model of a deployment: which servers run where, as frozen data."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr

from gymsdk.config.yaml import DEFAULT_PLACE, KeyPath, Node, Place

ServerKind: TypeAlias = Literal[
    "resources_servers", "responses_api_agents", "responses_api_models", "environment_servers"
]

RESOURCES: ServerKind = "resources_servers"
AGENTS: ServerKind = "responses_api_agents"
MODELS: ServerKind = "responses_api_models"
ENVIRONMENTS: ServerKind = "environment_servers"
SERVER_KINDS: tuple[ServerKind, ...] = (RESOURCES, AGENTS, MODELS, ENVIRONMENTS)

POLICY_SERVER = "policy_model"
"""The name of the model server of the policy."""

DEFAULT_HOST = "127.0.0.1"
DEFAULT_HEAD_PORT = 11000

IMPLEMENTATIONS: dict[ServerKind, tuple[str, ...]] = {
    AGENTS: ("simple_agent", "gymnasium_agent"),
    MODELS: ("gymsdk_model", "openai_model", "vllm_model"),
    ENVIRONMENTS: ("single_agent_turn", "single_agent_turn_legacy", "legacy_agent"),
}
"""The implementations of each kind. An implementation of `resources_servers` is the name of an environment."""

ENVIRONMENT_ALIASES = {
    "example_single_tool_call": "tool_call",
    "example_multi_step": "multineedle",
    "library_judge_math": "math",
    "math_with_judge": "math",
}
"""NeMo Gym's resources servers that correspond to one of our environments under another name."""

UNSUPPORTED_MODEL_SERVERS = {
    "local_vllm_model": "start vLLM with `gymsdk serve --launch-vllm`, or write vllm_model with its base_url",
    "local_vllm_model_proxy": "write vllm_model with the base_url of the vLLM server it would share",
    "azure_openai_model": "write openai_model with the openai_base_url of the deployment, ending in /openai/v1",
    "inference_provider": "write vllm_model with the provider's base_url, api_key and model",
    "litellm_model": "write vllm_model with the base_url of a LiteLLM proxy",
    "genrm_model": "write vllm_model with the judge's base_url, and name it in the settings of the environment",
}
"""NeMo Gym's model servers without an equivalent in gymsdk, and what to write instead."""

KEY_ALIASES: dict[str, dict[str, str]] = {
    "openai_model": {
        "model_name": "openai_model",
        "model": "openai_model",
        "base_url": "openai_base_url",
        "api_key": "openai_api_key",
    },
}
"""Aliases of keys by model server; for all other model servers, `model_name` is an alias of `model`."""


def _reject_bool(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("a port must be a number")  # noqa: TRY004  # pydantic collects ValueErrors
    return value


Port = Annotated[int, BeforeValidator(_reject_bool), Field(ge=1, le=65535)]
AnyPort = Annotated[int, BeforeValidator(_reject_bool), Field(ge=0, le=65535)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class FrozenModel(BaseModel):
    """The base of all parts of a deployment."""

    model_config = ConfigDict(frozen=True)


class HeadConfig(FrozenModel):
    """The address of the head; *given* tells an address in the configuration from the default."""

    host: str = DEFAULT_HOST
    port: AnyPort = DEFAULT_HEAD_PORT
    given: bool = False


class LogConfig(FrozenModel):
    """The level and the format of the log, and a folder for log files."""

    level: Literal["debug", "info", "warning", "error"] = "warning"
    format: Literal["text", "json"] = "text"
    folder: Path | None = None


class PortConfig(FrozenModel):
    """The range of ports for servers without a port; without a range they use any free port."""

    low: Port | None = None
    high: Port | None = None
    disallowed: tuple[Port, ...] = ()


class TlsConfig(FrozenModel):
    """The files with the certificate and the key of the servers."""

    certificate: Path
    key: Path


class PolicyConfig(FrozenModel):
    """The endpoint for model servers that do not name one."""

    base_urls: tuple[str, ...] = ()
    model_name: str | None = None
    api_key: SecretStr | None = None


class DatasetConfig(FrozenModel):
    """A dataset for rollouts: its name, its file of rows, and the number of rollouts of each row."""

    name: str
    path: Path
    type: str | None = None
    repeats: int = Field(1, ge=1)
    place: Place = DEFAULT_PLACE


class ResourcesServerConfig(FrozenModel):
    """The environment of a resources server, and whether the server also offers its tools over MCP."""

    environment: str
    mcp: bool = False


class ModelServerConfig(FrozenModel):
    """The arguments with which a model server calls `gymsdk.model(name, **options)`."""

    name: str
    options: Mapping[str, Any] = Field(default={}, repr=False, exclude=True)


class AgentServerConfig(FrozenModel):
    """The limits of an episode for an agent or an environment server; `None` leaves a limit to the host."""

    turns: int | None = Field(None, ge=1)
    tool_calls: int | None = Field(None, ge=0)
    seconds: Seconds | None = None


class ServerConfig(FrozenModel):
    """One server of a deployment.

    Attributes:
        name: The name of the instance.
        kind: The kind of server.
        implementation: The implementation; for a resources server, the name of its environment.
        part: The configuration that depends on the kind.
        host: The host to listen on, `None` for the default.
        port: The port to listen on, `None` for any.
        advertise_host: The host under which other machines reach the server.
        domain: NeMo Gym's domain of the environment.
        settings: All other settings; those of a resources server belong to its environment. They may contain keys, so
            they are never dumped.
        refers: The name of each server that this one uses, by key: `resources_server`, `model_server` and so on.
        models: The name of the model server for each setting of the environment that names a model, such as its judge.
        datasets: The datasets of the server.
        place: The place of the server in the configuration.
        places: The place of each setting.
    """

    name: str
    kind: ServerKind
    implementation: str
    part: ResourcesServerConfig | ModelServerConfig | AgentServerConfig
    host: str | None = None
    port: AnyPort | None = None
    advertise_host: str | None = None
    domain: str | None = None
    settings: Mapping[str, Any] = Field(default={}, repr=False, exclude=True)
    refers: Mapping[str, str] = {}
    models: Mapping[str, str] = {}
    datasets: tuple[DatasetConfig, ...] = ()
    place: Place = DEFAULT_PLACE
    places: Mapping[KeyPath, Place] = Field(default={}, repr=False, exclude=True)

    def place_of(self, path: KeyPath) -> Place:
        """Return the place of the setting at *path*, or of its nearest ancestor that exists."""
        ancestors = (path[:end] for end in range(len(path), 0, -1))
        return next((self.places[each] for each in ancestors if each in self.places), self.place)


class Setting(FrozenModel):
    """A resolved setting to show to users, with secrets redacted."""

    path: KeyPath
    value: Any
    place: Place


class Deployment(FrozenModel):
    """The head and the servers to run on this node, and how to run them.

    Attributes:
        head: The address of the head.
        default_host: The host of servers without one.
        advertise_host: The host under which other machines reach the servers.
        token_file: The file with the token that clients must send.
        insecure: Whether servers may listen to other machines without a token.
        tls: The certificate of the servers.
        ports: The ports that servers may use.
        logs: The log.
        profile: The folder for CPU profiles.
        capture: The folder for captured model calls.
        readiness: The seconds to wait for the endpoints of models.
        policy: The endpoint of the policy.
        servers: The servers.
        ignored: The place of each of NeMo Gym's keys that gymsdk ignores.
        notes: Warnings for the user.
        settings: All resolved settings, to show to the user.
    """

    head: HeadConfig = HeadConfig()
    default_host: str = DEFAULT_HOST
    advertise_host: str | None = None
    token_file: Path | None = None
    insecure: bool = False
    tls: TlsConfig | None = None
    ports: PortConfig = PortConfig()
    logs: LogConfig = LogConfig()
    profile: Path | None = None
    capture: Path | None = None
    readiness: float = Field(600.0, ge=0, allow_inf_nan=False)
    policy: PolicyConfig = PolicyConfig()
    servers: tuple[ServerConfig, ...] = ()
    ignored: Mapping[str, Place] = {}
    notes: tuple[str, ...] = ()
    settings: tuple[Setting, ...] = Field(default=(), repr=False)

    def get_servers(self, *kinds: ServerKind) -> tuple[ServerConfig, ...]:
        """Return the servers of these *kinds*."""
        return tuple(server for server in self.servers if server.kind in kinds)

    def find_dataset(self, name: str) -> tuple[ServerConfig, DatasetConfig] | None:
        """Return the dataset called *name* and its server, `None` if there is none."""
        found = ((server, each) for server in self.servers for each in server.datasets if each.name == name)
        return next(found, None)

    @property
    def ignored_keys_note(self) -> str | None:
        """One line that lists the ignored keys, `None` if there are none."""
        ignored = ", ".join(f"{key} ({place})" for key, place in self.ignored.items())
        return f"gymsdk ignores these keys of NeMo Gym: {ignored}" if ignored else None


def resolve_environment_name(name: str) -> str:
    """Return the name of our environment for NeMo Gym's resources server *name*."""
    return ENVIRONMENT_ALIASES.get(name, name)


def find_kind(implementation: str) -> ServerKind | None:
    """Return the kind of an *implementation*, `None` if its name does not determine the kind."""
    if implementation in UNSUPPORTED_MODEL_SERVERS:
        return MODELS
    return next((kind for kind, known in IMPLEMENTATIONS.items() if implementation in known), None)


def normalize_keys(root: Node) -> Node:
    """Return *root* with aliases in model servers replaced by the real keys, so that later files override earlier."""
    for name, server in root.children.items():
        models = server.get(MODELS)
        if models is None or not models.is_mapping:
            continue
        renamed = {
            implementation: _rename_keys(implementation, node) for implementation, node in models.children.items()
        }
        root = root.with_key(name, server.with_key(MODELS, Node({**renamed}, models.place)))
    return root


def _rename_keys(implementation: str, node: Node) -> Node:
    if not node.is_mapping:
        return node
    aliases = KEY_ALIASES.get(implementation, {"model_name": "model"})
    return Node({aliases.get(key, key): each for key, each in node.children.items()}, node.place)
