"""A deployment: what is to be served where, read, checked and frozen."""

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
"""What the model server is called that answers for the policy."""

IMPLEMENTATIONS: dict[ServerKind, tuple[str, ...]] = {
    AGENTS: ("simple_agent", "gymnasium_agent"),
    MODELS: ("gymsdk_model", "openai_model", "vllm_model"),
    ENVIRONMENTS: ("single_agent_turn", "single_agent_turn_legacy", "legacy_agent"),
}
"""What can be written under a kind; under `resources_servers` it is an environment's name."""

ENVIRONMENT_ALIASES = {
    "example_single_tool_call": "tool_call",
    "example_multi_step": "multineedle",
    "library_judge_math": "math",
    "math_with_judge": "math",
}
"""NeMo Gym's resources servers that an environment of ours is, where the names differ."""

UNSUPPORTED_MODEL_SERVERS = {
    "local_vllm_model": "start vLLM with `gymsdk serve --launch-vllm`, or write vllm_model with its base_url",
    "local_vllm_model_proxy": "write vllm_model with the base_url of the vLLM server it would share",
    "azure_openai_model": "write openai_model with the openai_base_url of the deployment, ending in /openai/v1",
    "inference_provider": "write vllm_model with the provider's base_url, api_key and model",
    "litellm_model": "write vllm_model with the base_url of a LiteLLM proxy",
    "genrm_model": "write vllm_model with the judge's base_url, and name it in the settings of the environment",
}
"""NeMo Gym's model servers that there are no counterparts of, and what to write instead."""

KEY_ALIASES: dict[str, dict[str, str]] = {
    "openai_model": {
        "model_name": "openai_model",
        "model": "openai_model",
        "base_url": "openai_base_url",
        "api_key": "openai_api_key",
    },
}
"""What a model server's keys are called too; with every other `model_name` means `model`."""


def resolve_environment_name(name: str) -> str:
    """Give the environment that NeMo Gym's resources server *name* is."""
    return ENVIRONMENT_ALIASES.get(name, name)


def find_kind(implementation: str) -> ServerKind | None:
    """Give the kind that *implementation* is of, `None` where its name does not tell."""
    if implementation in UNSUPPORTED_MODEL_SERVERS:
        return MODELS
    return next((kind for kind, known in IMPLEMENTATIONS.items() if implementation in known), None)


def normalize_keys(root: Node) -> Node:
    """Give *root* with the keys of its model servers called as one name each, so that later ones win over earlier."""
    for name, block in root.children.items():
        models = block.get(MODELS)
        if models is None or not models.is_mapping:
            continue
        renamed = {each: _renamed(each, node) for each, node in models.children.items()}
        root = root.with_key(name, block.with_key(MODELS, Node({**renamed}, models.place)))
    return root


def _renamed(implementation: str, node: Node) -> Node:
    if not node.is_mapping:
        return node
    names = KEY_ALIASES.get(implementation, {"model_name": "model"})
    return Node({names.get(key, key): each for key, each in node.children.items()}, node.place)


DEFAULT_HOST = "127.0.0.1"
DEFAULT_HEAD_PORT = 11000


def _number(given: object) -> object:
    if isinstance(given, bool):
        raise ValueError("a port is a number")  # noqa: TRY004  # what pydantic gathers
    return given


Port = Annotated[int, BeforeValidator(_number), Field(ge=1, le=65535)]
AnyPort = Annotated[int, BeforeValidator(_number), Field(ge=0, le=65535)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class FrozenModel(BaseModel):
    """Data that is read once."""

    model_config = ConfigDict(frozen=True)


class HeadConfig(FrozenModel):
    """Where the head is, and whether the configuration says so (*given*) or it is the default."""

    host: str = DEFAULT_HOST
    port: AnyPort = DEFAULT_HEAD_PORT
    given: bool = False


class LogConfig(FrozenModel):
    """How much is logged, in which form, and into which folder besides."""

    level: Literal["debug", "info", "warning", "error"] = "warning"
    format: Literal["text", "json"] = "text"
    folder: Path | None = None


class PortConfig(FrozenModel):
    """Which ports servers without one of their own may take; any free one where no range is given."""

    low: Port | None = None
    high: Port | None = None
    disallowed: tuple[Port, ...] = ()


class TlsConfig(FrozenModel):
    """The certificate and key that servers show."""

    certificate: Path
    key: Path


class PolicyConfig(FrozenModel):
    """The endpoint that models without one of their own use."""

    base_urls: tuple[str, ...] = ()
    model_name: str | None = None
    api_key: SecretStr | None = None


class DatasetConfig(FrozenModel):
    """Rows that can be rolled out by *name*: each of them *repeats* times."""

    name: str
    path: Path
    type: str | None = None
    repeats: int = Field(1, ge=1)
    place: Place = DEFAULT_PLACE


class ResourcesServerConfig(FrozenModel):
    """A resources server's part: the environment it serves, and whether its tools are offered over MCP too."""

    environment: str
    mcp: bool = False


class ModelServerConfig(FrozenModel):
    """A model server's part: what `gymsdk.model(name, **options)` is called with."""

    name: str
    options: Mapping[str, Any] = Field(default={}, repr=False, exclude=True)


class AgentServerConfig(FrozenModel):
    """An agent's or an environment server's part: the budget of an episode, `None` leaving it to the host."""

    turns: int | None = Field(None, ge=1)
    tool_calls: int | None = Field(None, ge=0)
    seconds: Seconds | None = None


class ServerConfig(FrozenModel):
    """One server to be: the *name* of the instance, its kind and implementation, where it listens, what it refers to.

    *refers* has the name of the other server by key (`resources_server`, `model_server`, `agent_server`, …), *models*
    the name of the model server that plays a setting of an environment, such as its judge, *settings* what else stands
    in the block; an environment's are those to load it with. *host* and *port* are `None` where the
    block does not say. Settings may hold keys: they are in no dump.
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

    def place_of(self, trail: KeyPath) -> Place:
        """Give the place of the setting that *trail* leads to, or of the nearest above it that is there."""
        ways = (trail[:end] for end in range(len(trail), 0, -1))
        return next((self.places[way] for way in ways if way in self.places), self.place)


class Setting(FrozenModel):
    """One resolved setting as it may be shown: its secrets are hidden."""

    trail: KeyPath
    value: Any
    place: Place


class Deployment(FrozenModel):
    """What is to be served: the head, the servers of this node, and how they are run.

    *ignored* has the place of each of NeMo Gym's keys that mean nothing here, *notes* sentences somebody should read,
    *settings* everything that was read, for showing.
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
        """Give the servers of *kinds*."""
        return tuple(each for each in self.servers if each.kind in kinds)

    def find_dataset(self, name: str) -> tuple[ServerConfig, DatasetConfig] | None:
        """Give the dataset called *name* and the server it stands in, `None` where there is none."""
        found = ((block, each) for block in self.servers for each in block.datasets if each.name == name)
        return next(found, None)

    @property
    def ignored_keys_note(self) -> str | None:
        """The one line that says which keys are ignored."""
        told = ", ".join(f"{key} ({place})" for key, place in self.ignored.items())
        return f"NeMo Gym's keys that mean nothing here: {told}" if told else None
