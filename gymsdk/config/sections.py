"""Blocks: the servers that a configuration names, each read by its kind."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, SecretStr

from gymsdk.config import fields, resolve, servers
from gymsdk.config.fields import is_set, read_fields, validate_fields
from gymsdk.config.model import (
    DEFAULT_HEAD_PORT,
    DEFAULT_HOST,
    ENVIRONMENTS,
    IMPLEMENTATIONS,
    MODELS,
    RESOURCES,
    SERVER_KINDS,
    UNSUPPORTED_MODEL_SERVERS,
    AgentServerConfig,
    AnyPort,
    DatasetConfig,
    Deployment,
    HeadConfig,
    LogConfig,
    ModelServerConfig,
    PolicyConfig,
    Port,
    PortConfig,
    ResourcesServerConfig,
    ServerConfig,
    ServerKind,
    TlsConfig,
    resolve_environment_name,
)
from gymsdk.config.servers import normalize_base_urls, read_model_server, translate_judge_settings
from gymsdk.config.yaml import KeyPath, Node, Place, Problems, format_key_path, to_plain
from gymsdk.errors import format_suggestion

HEAD_SERVER_KEY = "head_server"
HEAD_SERVER_FIELDS = ("host", "port")
MIN_PORT, MAX_PORT = 1024, 65535
"""The ends of a range of ports that are not given."""
COPIED_KEYS = ("default_host", "advertise_host", "token_file", "insecure")


def _several(given: object) -> object:
    return (given,) if isinstance(given, str) else given


class _Switches(BaseModel):
    model_config = ConfigDict(frozen=True, populate_by_name=True)

    use_absolute_ip: bool = False
    profiling_enabled: bool = False
    policy_api_key: SecretStr | None = None
    policy_model_name: str | None = Field(None, coerce_numbers_to_str=True)
    policy_base_url: Annotated[tuple[str, ...], BeforeValidator(_several)] = ()
    tls_certificate: str | None = None
    tls_key: str | None = None
    profile_dir: str | None = None
    profiling_results_dirpath: str | None = None
    observability_enabled: bool = False
    model_call_capture_dir: str | None = None


def _alone(host: str) -> str:
    if re.search(r"[@/\s]", host):
        raise ValueError("a host is a name or an address alone, without a user and password, http:// or a port")
    return host


class _Head(BaseModel):
    host: Annotated[str, AfterValidator(_alone)]
    port: AnyPort


class _Range(BaseModel):
    port_range_low: Port | None = None
    port_range_high: Port | None = None
    disallowed_ports: tuple[Port, ...] = ()


def read_deployment(root: Node, folder: Path, problems: Problems) -> Deployment:
    """Give the deployment *root* describes, its servers left out; paths are taken from *folder*."""
    return _Reading(root, folder, problems).deployment()


class _Reading:
    """One reading of the top of *root*."""

    def __init__(self, root: Node, folder: Path, problems: Problems) -> None:
        self._root = root
        self._folder = folder
        self._problems = problems
        self._values: dict[str, Any] = {
            key: to_plain(node) for key, node in root.children.items() if is_set(node) and node.value != ""
        }

    def deployment(self) -> Deployment:
        switches = self._checked(_Switches, self._values, {}) or _Switches()
        values = {key: self._values[key] for key in COPIED_KEYS if key in self._values}
        if switches.use_absolute_ip and "default_host" not in values:
            values["default_host"] = _own_address()
        readiness = {"readiness": "model_endpoint_readiness_timeout_seconds"}
        values |= {field: self._values[key] for field, key in readiness.items() if key in self._values}
        values |= self._path("token_file") | {"profile": self._profile(switches), "capture": self._capture(switches)}
        found = self._checked(Deployment, values, readiness) or Deployment()
        parts = {
            "head": self._head(found.default_host),
            "tls": self._tls(),
            "ports": self._ports(),
            "logs": self._logs(),
            "policy": PolicyConfig(
                base_urls=normalize_base_urls(switches.policy_base_url),
                model_name=switches.policy_model_name,
                api_key=switches.policy_api_key,
            ),
        }
        return found.model_copy(update=parts)

    def _checked(self, kind: type[Any], values: dict[str, Any], keys: dict[str, str]) -> Any:
        return validate_fields(kind, values, keys=keys, root=self._root, trail=(), problems=self._problems)

    def _head(self, default_host: str) -> HeadConfig:
        node = self._root.get(HEAD_SERVER_KEY)
        if node is None or node.value is None:
            return HeadConfig(host=default_host)
        if not node.is_mapping:
            self._problems.add(node.place, "head_server must hold host and port, as in head_server: {port: 11000}")
            return HeadConfig(host=default_host)
        for key, each in node.children.items():
            if key not in {*HEAD_SERVER_FIELDS, "num_workers"}:
                near = format_suggestion(key, HEAD_SERVER_FIELDS, "it has host and port")
                self._problems.add(each.place, f"head_server has no setting {key!r}{near}")
        said = read_fields(node, {key: key for key in HEAD_SERVER_FIELDS})
        named = {key: f"{HEAD_SERVER_KEY}.{key}" for key in HEAD_SERVER_FIELDS}
        found = self._checked(_Head, {"host": default_host, "port": DEFAULT_HEAD_PORT} | said, named)
        return HeadConfig(host=found.host, port=found.port, given=True) if found else HeadConfig(host=default_host)

    def _tls(self) -> TlsConfig | None:
        names = {"certificate": "tls_certificate", "key": "tls_key"}
        paths = {field: self._folder / str(self._values[key]) for field, key in names.items() if key in self._values}
        if len(paths) == 1:
            [there] = (names[field] for field in paths)
            [absent] = (key for key in names.values() if key != there)
            place = self._root.place_of((there,))
            self._problems.add(place, f"{there} is given without {absent}; TLS needs both, give {absent} too")
        return TlsConfig(**paths) if len(paths) == len(names) else None

    def _ports(self) -> PortConfig:
        found = self._checked(_Range, self._values, {}) or _Range()
        low, high = found.port_range_low, found.port_range_high
        if low is not None and high is not None and low > high:
            place = self._root.place_of(("port_range_low",))
            self._problems.add(place, f"port_range_low {low} is above port_range_high {high}; swap them")
        # Half a range goes to an end that every user may have, ports to be left out leave the rest.
        if (low, high) != (None, None) or found.disallowed_ports:
            low, high = MIN_PORT if low is None else low, MAX_PORT if high is None else high
        return PortConfig(low=low, high=high, disallowed=found.disallowed_ports)

    def _logs(self) -> LogConfig:
        folder = "log_dir" if "log_dir" in self._values else "nemo_gym_log_dir"
        names = {"level": "log_level", "format": "log_format", "folder": folder}
        said = {field: self._values[key] for field, key in names.items() if key in self._values}
        said |= {"level": str(said["level"]).lower()} if "level" in said else {}
        found: LogConfig | None = self._checked(LogConfig, said | self._path(folder, "folder"), names)
        return found or LogConfig()

    def _profile(self, switches: _Switches) -> Path | None:
        named = self._values.get("profile_dir")
        theirs = self._values.get("profiling_results_dirpath", "profiles") if switches.profiling_enabled else None
        found = named or theirs
        return self._folder / str(found) if found else None

    def _capture(self, switches: _Switches) -> Path | None:
        if not switches.observability_enabled:
            return None
        if switches.model_call_capture_dir is None:
            place = self._root.place_of(("observability_enabled",))
            sentence = "observability_enabled needs model_call_capture_dir; set it to a folder"
            self._problems.add(place, sentence)
            return None
        return self._folder / switches.model_call_capture_dir

    def _path(self, key: str, field: str | None = None) -> dict[str, Path]:
        value = self._values.get(key)
        return {field or key: self._folder / value} if isinstance(value, str) else {}


def _own_address() -> str:
    """Give the address other machines have for this one, as far as it knows."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return DEFAULT_HOST


MCP_KEY = "expose_tools_over_mcp"
LISTEN_KEYS = ("host", "port", "advertise_host", "domain")
BUDGET_FIELDS = {"turns": "turns", "tool_calls": "tool_calls", "seconds": "deadline"}
TURN_KEYS = ("turns", "max_steps", "max_turns")
EPISODE_TIMEOUT_KEY = "default_episode_timeout_seconds"
DATASET_FIELDS = {"name": "name", "path": "jsonl_fpath", "type": "type", "repeats": "num_repeats"}


def is_server(node: Node) -> bool:
    """Whether *node* has the shape of a server: a kind, and beneath it an implementation."""
    return any(kind in node.children for kind in SERVER_KINDS)


class ServerReader:
    """One reading of the blocks of *root*; *ignored* gathers NeMo Gym's keys that mean nothing here, with places."""

    def __init__(self, root: Node, policy: PolicyConfig, folder: Path, problems: Problems) -> None:
        self.ignored: dict[str, Place] = {}
        self._root = root
        self._policy = policy
        self._folder = folder
        self._problems = problems

    def read(self) -> tuple[ServerConfig, ...]:
        """Give the blocks that are right."""
        found = (self._block(name, node) for name, node in self._root.children.items() if is_server(node))
        return tuple(block for block in found if block is not None)

    def _block(self, name: str, node: Node) -> ServerConfig | None:
        kind = self._kind(name, node)
        implementation = self._implementation(name, kind, node.children[kind]) if kind else None
        if kind is None or implementation is None:
            return None
        trail = (name, kind, implementation)
        body = node.children[kind].children[implementation]
        if body.value is None:
            body = Node({}, body.place)
        if not body.is_mapping:
            self._problems.add(
                body.place, f"{format_key_path(trail)} must hold `key: value` lines, as in entrypoint: app.py"
            )
            return None
        return self._read(trail, kind, body)

    def _read(self, trail: KeyPath, kind: ServerKind, body: Node) -> ServerConfig | None:
        refers = resolve.read_references(trail, body, self._problems)
        for key in fields.get_ignored_keys(trail[2]) & body.children.keys() - refers.keys():
            if body.children[key].value is not None:
                self.ignored.setdefault(key, body.children[key].place)
        rest = body.without(
            *fields.SERVER_KEYS, *refers, *resolve.get_reference_keys(kind), *fields.get_ignored_keys(trail[2])
        )
        refused = servers.IMPLEMENTATION_SETTINGS.get(trail[2], {})
        rest = servers.remove_unsupported(rest, trail, refused, self._problems)
        models: dict[str, str] = {}
        if kind == RESOURCES:
            models = {key: name for key, name in refers.items() if to_plain(body.children[key])["type"] == MODELS}
            rest, models = translate_judge_settings(
                resolve_environment_name(trail[2]), trail, rest, models, self._problems
            )
        else:
            self._check_keys(trail, rest, {*refused})
        part = self._part(kind, trail, rest)
        values = read_fields(body, {key: key for key in LISTEN_KEYS})
        datasets = tuple(self._datasets(trail, body))
        whole = {
            "name": trail[0],
            "kind": kind,
            "implementation": trail[2],
            # Where the part is wrong, that has been told: the rest of the block is looked at all the same.
            "part": part or AgentServerConfig(),
            "settings": to_plain(rest.without(MCP_KEY)) if kind == RESOURCES else to_plain(rest),
            "refers": refers,
            "models": models,
            "datasets": datasets,
            "place": body.place,
            "places": dict(rest.places()),
        }
        return validate_fields(
            ServerConfig, whole | values, keys={}, root=self._root, trail=trail, problems=self._problems
        )

    def _kind(self, name: str, node: Node) -> ServerKind | None:
        kinds = [kind for kind in SERVER_KINDS if kind in node.children]
        if len(kinds) > 1:
            first, second = (f"{kind} at {node.children[kind].place}" for kind in kinds[:2])
            self._problems.add(node.place, f"{name} is both {first} and {second}; call one of them something else")
            return None
        for key in node.children:
            if key not in kinds:
                near = format_suggestion(key, SERVER_KINDS, f"move it beneath {kinds[0]} and its implementation")
                self._problems.add(node.children[key].place, f"{name}.{key} is no kind of server{near}")
        return kinds[0]

    def _implementation(self, name: str, kind: ServerKind, node: Node) -> str | None:
        below = list(node.children)
        if len(below) != 1:
            told = " and ".join(f"{each} ({node.children[each].place})" for each in below) or "none"
            choice = " or ".join(IMPLEMENTATIONS.get(kind, ("an environment's name",)))
            advice = "keep one" if below else f"write {choice} beneath it"
            self._problems.add(node.place, f"{name}.{kind} needs one implementation, and has {told}; {advice}")
            return None
        implementation, known = below[0], IMPLEMENTATIONS.get(kind)
        place = node.children[implementation].place
        if kind == MODELS and implementation in UNSUPPORTED_MODEL_SERVERS:
            self._problems.add(
                place, f"{name}: {implementation} has no counterpart here; {UNSUPPORTED_MODEL_SERVERS[implementation]}"
            )
            return None
        if known is not None and implementation not in known:
            near = format_suggestion(implementation, known, f"there are {', '.join(known)}")
            self._problems.add(place, f"{name}: {kind} has no implementation {implementation!r} here{near}")
            return None
        return implementation

    def _check_keys(self, trail: KeyPath, rest: Node, refused: set[str]) -> None:
        """Report unknown keys of *rest*: an error for a slip and for a server of gymsdk's own, else a warning."""
        used = fields.get_used_keys(trail[2]) | {*resolve.get_reference_keys(trail[1])}
        for key, node in rest.children.items():
            if key in used:
                continue
            if trail[2] == "gymsdk_model" or fields.is_misspelling(key, used | refused):
                near = format_suggestion(key, used | refused, f"it may hold {', '.join(sorted(used))}")
                self._problems.add(node.place, f"{format_key_path(trail)} has no setting {key!r}{near}")
            else:
                self._problems.warn(
                    node.place, f"{format_key_path((*trail, key))} is not known to gymsdk and is ignored"
                )

    def _part(
        self, kind: ServerKind, trail: KeyPath, rest: Node
    ) -> ResourcesServerConfig | ModelServerConfig | AgentServerConfig | None:
        if kind == MODELS:
            return read_model_server(trail[2], rest, self._policy, trail, self._problems)
        if kind == RESOURCES:
            mcp = rest.get(MCP_KEY)
            values: dict[str, Any] = {"environment": resolve_environment_name(trail[2])} | (
                {"mcp": mcp.value} if mcp else {}
            )
            return validate_fields(
                ResourcesServerConfig,
                values,
                keys={"mcp": MCP_KEY},
                root=self._root,
                trail=trail,
                problems=self._problems,
            )
        turns = next((key for key in TURN_KEYS if is_set(rest.get(key))), TURN_KEYS[0])
        called = BUDGET_FIELDS | {"turns": turns} | ({"seconds": EPISODE_TIMEOUT_KEY} if kind == ENVIRONMENTS else {})
        values = read_fields(rest, called)
        return validate_fields(
            AgentServerConfig, values, keys=called, root=self._root, trail=trail, problems=self._problems
        )

    def _datasets(self, trail: KeyPath, body: Node) -> Iterator[DatasetConfig]:
        node = body.get("datasets")
        if node is None or node.value is None:
            return
        if not isinstance(node.value, list):
            self._problems.add(node.place, f"{format_key_path(trail)}.datasets must be a list of name and jsonl_fpath")
            return
        for number, each in enumerate(node.value):
            values = read_fields(each, DATASET_FIELDS)
            if isinstance(path := values.get("path"), str):
                values["path"] = self._folder / path
            where = (*trail, "datasets", str(number))
            values["place"] = each.place
            found = validate_fields(
                DatasetConfig, values, keys=DATASET_FIELDS, root=self._root, trail=where, problems=self._problems
            )
            if found is not None:
                yield found
