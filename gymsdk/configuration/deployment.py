"""A deployment: what is to be served where, read, checked and frozen."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr

from gymsdk.configuration.kinds import Kind
from gymsdk.configuration.places import DEFAULT, Place, Trail

LOCAL = "127.0.0.1"
HEAD = 11000


def _number(given: object) -> object:
    if isinstance(given, bool):
        raise ValueError("a port is a number")  # noqa: TRY004  # what pydantic gathers
    return given


Port = Annotated[int, BeforeValidator(_number), Field(ge=1, le=65535)]
AnyPort = Annotated[int, BeforeValidator(_number), Field(ge=0, le=65535)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Frozen(BaseModel):
    """Data that is read once."""

    model_config = ConfigDict(frozen=True)


class Head(Frozen):
    """Where the head is, and whether the configuration says so (*given*) or it is the default."""

    host: str = LOCAL
    port: AnyPort = HEAD
    given: bool = False


class Logs(Frozen):
    """How much is logged, in which form, and into which folder besides."""

    level: Literal["debug", "info", "warning", "error"] = "warning"
    format: Literal["text", "json"] = "text"
    folder: Path | None = None


class Ports(Frozen):
    """Which ports servers without one of their own may take; any free one where no range is given."""

    low: Port | None = None
    high: Port | None = None
    disallowed: tuple[Port, ...] = ()


class Tls(Frozen):
    """The certificate and key that servers show."""

    certificate: Path
    key: Path


class Policy(Frozen):
    """The endpoint that models without one of their own use."""

    base_urls: tuple[str, ...] = ()
    model_name: str | None = None
    api_key: SecretStr | None = None


class Dataset(Frozen):
    """Rows that can be rolled out by *name*: each of them *repeats* times."""

    name: str
    path: Path
    type: str | None = None
    repeats: int = Field(1, ge=1)
    place: Place = DEFAULT


class Resources(Frozen):
    """A resources server's part: the environment it serves, and whether its tools are offered over MCP too."""

    environment: str
    mcp: bool = False


class Player(Frozen):
    """A model server's part: what `gymsdk.model(name, **options)` is called with."""

    name: str
    options: Mapping[str, Any] = Field(default={}, repr=False, exclude=True)


class Agent(Frozen):
    """An agent's or an environment server's part: the budget of an episode, `None` leaving it to the host."""

    turns: int | None = Field(None, ge=1)
    tool_calls: int | None = Field(None, ge=0)
    seconds: Seconds | None = None


class Block(Frozen):
    """One server to be: the *name* of the instance, its kind and implementation, where it listens, what it refers to.

    *refers* has the name of the other server by key (`resources_server`, `model_server`, `agent_server`, …), *models*
    the name of the model server that plays a setting of an environment, such as its judge, *settings* what else stands
    in the block; an environment's are those to load it with. *host* and *port* are `None` where the
    block does not say. Settings may hold keys: they are in no dump.
    """

    name: str
    kind: Kind
    implementation: str
    part: Resources | Player | Agent
    host: str | None = None
    port: AnyPort | None = None
    advertise_host: str | None = None
    domain: str | None = None
    settings: Mapping[str, Any] = Field(default={}, repr=False, exclude=True)
    refers: Mapping[str, str] = {}
    models: Mapping[str, str] = {}
    datasets: tuple[Dataset, ...] = ()
    place: Place = DEFAULT
    places: Mapping[Trail, Place] = Field(default={}, repr=False, exclude=True)

    def place_of(self, trail: Trail) -> Place:
        """Give the place of the setting that *trail* leads to, or of the nearest above it that is there."""
        ways = (trail[:end] for end in range(len(trail), 0, -1))
        return next((self.places[way] for way in ways if way in self.places), self.place)


class Setting(Frozen):
    """One resolved setting as it may be shown: its secrets are hidden."""

    trail: Trail
    value: Any
    place: Place


class Deployment(Frozen):
    """What is to be served: the head, the servers of this node, and how they are run.

    *ignored* has the place of each of NeMo Gym's keys that mean nothing here, *notes* sentences somebody should read,
    *settings* everything that was read, for showing.
    """

    head: Head = Head()
    default_host: str = LOCAL
    advertise_host: str | None = None
    token_file: Path | None = None
    insecure: bool = False
    tls: Tls | None = None
    ports: Ports = Ports()
    logs: Logs = Logs()
    profile: Path | None = None
    capture: Path | None = None
    readiness: float = Field(600.0, ge=0, allow_inf_nan=False)
    policy: Policy = Policy()
    servers: tuple[Block, ...] = ()
    ignored: Mapping[str, Place] = {}
    notes: tuple[str, ...] = ()
    settings: tuple[Setting, ...] = Field(default=(), repr=False)

    def get_servers(self, *kinds: Kind) -> tuple[Block, ...]:
        """Give the servers of *kinds*."""
        return tuple(each for each in self.servers if each.kind in kinds)

    def find_dataset(self, name: str) -> tuple[Block, Dataset] | None:
        """Give the dataset called *name* and the server it stands in, `None` where there is none."""
        found = ((block, each) for block in self.servers for each in block.datasets if each.name == name)
        return next(found, None)

    @property
    def ignored_keys_note(self) -> str | None:
        """The one line that says which keys are ignored."""
        told = ", ".join(f"{key} ({place})" for key, place in self.ignored.items())
        return f"NeMo Gym's keys that mean nothing here: {told}" if told else None
