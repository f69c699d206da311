"""Read the sections of a configuration: the settings of the whole deployment, and each server."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from gymsdk.config import fields, resolve, servers
from gymsdk.config.fields import (
    HEAD_SERVER_KEY,
    TOKEN_CAPTURE_KEY,
    Switches,
    get_keys,
    is_path,
    is_set,
    list_fields,
    read_fields,
    validate_fields,
)
from gymsdk.config.model import (
    ALIAS_SETTINGS,
    DEFAULT_HEAD_PORT,
    DEFAULT_HOST,
    ENVIRONMENTS,
    IMPLEMENTATIONS,
    MCP_KEY,
    MODELS,
    RESOURCES,
    SERVER_KINDS,
    UNSUPPORTED_MODEL_SERVERS,
    AgentServerConfig,
    AnyPort,
    DatasetConfig,
    Deployment,
    ModelServerConfig,
    PolicyConfig,
    PortRange,
    ResourcesServerConfig,
    ServerConfig,
    ServerKind,
    TokenCaptureConfig,
    resolve_environment_name,
)
from gymsdk.config.servers import normalize_base_urls, read_model_server, translate_judge_settings
from gymsdk.config.yaml import KeyPath, Place, Problems, YamlNode, format_key_path, to_plain
from gymsdk.errors import format_suggestion
from gymsdk.http.tls import Tls

M = TypeVar("M", bound=BaseModel)

MIN_PORT, MAX_PORT = 1024, 65535
"""The default ends of the range of ports."""

TOKEN_CAPTURE_IGNORED = (
    *("allow_unresolved_continuations", "control_auth_token_env", "delta_records", "external_staging_backend"),
    *("lineage_store", "lineage_store_kwargs", "sink_kwargs"),
)
"""The keys of NeMo Gym's `token_id_capture` that gymsdk ignores."""


class _TokenCapture(BaseModel):
    """The keys of `token_id_capture` that gymsdk reads, and those of other stores, which it cannot replace."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    enabled: bool = False
    all_agents: bool = False
    dir: str | None = None
    rebuild_response: bool = True
    max_mask_fraction: float | None = Field(None, ge=0, le=1)
    mask_fraction_min_samples: int = Field(50, ge=0)
    sink: object = None
    external_staging: object = False


def _check_host(host: str) -> str:
    if re.search(r"[@/\s]", host):
        raise ValueError("a host must be a name or an address only, without user, password, http:// or port")
    return host


class _Head(BaseModel):
    model_config = ConfigDict(populate_by_name=True)

    host: Annotated[str, AfterValidator(_check_host)] = Field(validation_alias="host")
    port: AnyPort = Field(validation_alias="port")


class _Reader:
    """Reads a part of the configuration *root*.

    Args:
        folder: The folder for relative paths.
        problems: Receives the errors.
    """

    def __init__(self, root: YamlNode, folder: Path, problems: Problems) -> None:
        self._root = root
        self._folder = folder
        self._problems = problems

    def _validate(self, model: type[M], values: dict[str, Any], *path: str) -> M | None:
        return validate_fields(model, values, root=self._root, path=path, problems=self._problems)


class DeploymentReader(_Reader):
    """Reads the settings at the top."""

    def __init__(self, root: YamlNode, folder: Path, problems: Problems) -> None:
        super().__init__(root, folder, problems)
        # `${oc.env:NAME,}` resolves to an empty text, which sets nothing.
        self._values: dict[str, Any] = {
            key: to_plain(node) for key, node in root.children.items() if is_set(node) and node.value != ""
        }

    def read(self) -> Deployment:
        """Return the deployment without its servers."""
        switches = self._validate(Switches, self._values) or Switches()
        values = self._read_values()
        if switches.use_absolute_ip:
            # A host that a file names takes precedence over the switch.
            values.setdefault("host", _get_own_address())
        if switches.profiling_enabled:
            values.setdefault("profile", self._folder / switches.profiling_results_dirpath)
        self._check_tls(values)
        capture = values.get("capture")
        values["token_capture"] = self._read_token_capture(capture if isinstance(capture, Path) else None)
        deployment = self._validate(Deployment, values) or Deployment()
        head_host, port = self._read_head(deployment.host)
        base_urls = normalize_base_urls(deployment.policy.base_urls)
        parts = {
            "head_host": head_host,
            "port": port,
            "capture": self._check_capture(switches, deployment.capture),
            "port_range": self._complete_port_range(deployment.port_range),
            "policy": deployment.policy.model_copy(update={"base_urls": base_urls}),
        }
        return deployment.model_copy(update=parts)

    def _read_values(self) -> dict[str, Any]:
        """Return the values of the fields of a deployment, nested like the models."""
        values: dict[str, Any] = {}
        for path, field in list_fields(Deployment).items():
            key = next((key for key in get_keys(field) if key in self._values), None)
            if key is None:
                continue
            value, tree = self._values[key], values
            for name in path[:-1]:
                tree = tree.setdefault(name, {})
            tree[path[-1]] = self._folder / value if is_path(field) and isinstance(value, str) else value
        return values

    def _read_head(self, default_host: str) -> tuple[str | None, int]:
        """Return the host of the head, `None` if no file names a head, and its port."""
        node = self._root.get(HEAD_SERVER_KEY)
        if node is None or node.value is None:
            return None, DEFAULT_HEAD_PORT
        if not node.is_mapping:
            self._problems.add(node.place, "head_server must hold host and port, as in head_server: {port: 11000}")
            return None, DEFAULT_HEAD_PORT
        for key, child in node.children.items():
            if key not in {*_Head.model_fields, "num_workers"}:
                hint = format_suggestion(key, _Head.model_fields, "it has host and port")
                self._problems.add(child.place, f"head_server has no setting {key!r}{hint}")
        values = {"host": default_host, "port": DEFAULT_HEAD_PORT} | read_fields(node, _Head)
        head = self._validate(_Head, values, HEAD_SERVER_KEY)
        return (head.host, head.port) if head else (None, DEFAULT_HEAD_PORT)

    def _check_tls(self, values: dict[str, Any]) -> None:
        """Report a certificate without its key, or a key without its certificate, and remove it."""
        keys = {path[-1]: get_keys(field)[0] for path, field in list_fields(Tls).items()}
        given = values.get("tls", {})
        if len(given) == 1:
            [present] = (keys[field] for field in given)
            [missing] = (key for key in keys.values() if key != present)
            place = self._root.place_of((present,))
            self._problems.add(place, f"{present} is given without {missing}; TLS needs both, give {missing} too")
            # The rest is still validated, so that one start shows all errors.
            del values["tls"]

    def _complete_port_range(self, ports: PortRange) -> PortRange:
        low, high = ports.low, ports.high
        if low is not None and high is not None and low > high:
            place = self._root.place_of(("port_range_low",))
            self._problems.add(place, f"port_range_low {low} is above port_range_high {high}; swap them")
        # A missing end is set to the first or last port for normal users; disallowed ports need a range, too.
        if (low, high) != (None, None) or ports.disallowed:
            low, high = MIN_PORT if low is None else low, MAX_PORT if high is None else high
        return PortRange(low=low, high=high, disallowed=ports.disallowed)

    def _check_capture(self, switches: Switches, folder: Path | None) -> Path | None:
        """Return the *folder* for model calls if they are captured."""
        if switches.observability_enabled and folder is None:
            place = self._root.place_of(("observability_enabled",))
            self._problems.add(place, "observability_enabled needs model_call_capture_dir; set it to a folder")
        return folder if switches.observability_enabled else None

    def _read_token_capture(self, default: Path | None) -> TokenCaptureConfig | None:
        values = self._values.get(TOKEN_CAPTURE_KEY) or {}
        if not isinstance(values, dict):
            place = self._root.place_of((TOKEN_CAPTURE_KEY,))
            self._problems.add(place, "token_id_capture must hold enabled and dir, as in {enabled: true, dir: /tokens}")
            return None
        values = {key: value for key, value in values.items() if key not in TOKEN_CAPTURE_IGNORED}
        capture = self._validate(_TokenCapture, values, TOKEN_CAPTURE_KEY)
        if capture is None or not capture.enabled:
            return None
        place = self._root.place_of((TOKEN_CAPTURE_KEY, "enabled"))
        if capture.sink is not None or capture.external_staging is not False:
            problem = "token_id_capture.sink and external_staging are not supported: gymsdk writes files; remove them"
            self._problems.add(place, problem)
            return None
        folder = self._folder / capture.dir if capture.dir else default
        if folder is None:
            self._problems.add(place, "token_id_capture needs dir; set it to a folder")
            return None
        settings = capture.model_dump(exclude={"enabled", "dir", "sink", "external_staging"})
        return TokenCaptureConfig(folder=folder, **settings)


def _get_own_address() -> str:
    """Return the address of this machine for others, or the default host if it is unknown."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return DEFAULT_HOST


def is_server(node: YamlNode) -> bool:
    """Whether *node* has the form of a server: a kind, which contains an implementation."""
    return any(kind in node.children for kind in SERVER_KINDS)


class ServerReader(_Reader):
    """Reads the servers; *ignored* collects NeMo Gym's keys that gymsdk ignores, with their places."""

    def __init__(self, root: YamlNode, policy: PolicyConfig, folder: Path, problems: Problems) -> None:
        super().__init__(root, folder, problems)
        self.ignored: dict[str, Place] = {}
        self._policy = policy

    def read(self) -> tuple[ServerConfig, ...]:
        """Return the valid servers."""
        server_configs = (
            self._read_server(name, node) for name, node in self._root.children.items() if is_server(node)
        )
        return tuple(server for server in server_configs if server is not None)

    def _read_server(self, name: str, node: YamlNode) -> ServerConfig | None:
        kind = self._get_kind(name, node)
        implementation = self._get_implementation(name, kind, node.children[kind]) if kind else None
        if kind is None or implementation is None:
            return None
        path = (name, kind, implementation)
        body = node.children[kind].children[implementation]
        if body.value is None:
            body = YamlNode({}, body.place)
        if not body.is_mapping:
            self._problems.add(
                body.place, f"{format_key_path(path)} must hold `key: value` lines, as in entrypoint: app.py"
            )
            return None
        return self._read_body(path, kind, body)

    def _read_body(self, path: KeyPath, kind: ServerKind, body: YamlNode) -> ServerConfig | None:
        implementation = path[2]
        references = resolve.read_references(path, body, self._problems)
        ignored = fields.get_ignored_keys(implementation)
        for key in ignored & body.children.keys() - references.keys():
            if body.children[key].value is not None:
                self.ignored.setdefault(key, body.children[key].place)
        settings = body.without(*fields.SERVER_KEYS, *references, *resolve.get_reference_keys(kind), *ignored)
        unsupported = servers.IMPLEMENTATION_SETTINGS.get(implementation, {})
        settings = servers.remove_unsupported(settings, path, unsupported, self._problems)
        models: dict[str, str] = {}
        if kind == RESOURCES:
            models = {key: name for key, name in references.items() if to_plain(body.children[key])["type"] == MODELS}
            environment = resolve_environment_name(implementation)
            settings, models = translate_judge_settings(environment, path, settings, models, self._problems)
            for key, value in ALIAS_SETTINGS.get(implementation, {}).items():
                if key not in settings.children:
                    settings = settings.with_key(key, YamlNode(value, body.place))
        else:
            self._check_keys(path, settings, {*unsupported})
        kind_settings = self._read_kind_settings(kind, path, settings)
        values = {
            "name": path[0],
            "kind": kind,
            "implementation": implementation,
            # If these are invalid, their error is already reported; the rest is still validated.
            "kind_settings": kind_settings or AgentServerConfig(),
            "settings": to_plain(settings.without(MCP_KEY)) if kind == RESOURCES else to_plain(settings),
            "refers": references,
            "models": models,
            "datasets": tuple(self._read_datasets(path, body)),
            "place": body.place,
            "places": {path: node.place for path, node in settings.walk()},
        }
        # The program of a resources server and its settings, as far as they are valid.
        written = to_plain(body) if kind == RESOURCES else {}
        if isinstance(entrypoint := written.get("entrypoint"), str):
            values |= {"entrypoint": entrypoint, "written": written}
        return self._validate(ServerConfig, values | read_fields(body, ServerConfig), *path)

    def _get_kind(self, name: str, node: YamlNode) -> ServerKind | None:
        kinds = [kind for kind in SERVER_KINDS if kind in node.children]
        if len(kinds) > 1:
            first, second = (f"{kind} at {node.children[kind].place}" for kind in kinds[:2])
            self._problems.add(node.place, f"{name} is both {first} and {second}; rename one of them")
            return None
        for key, child in node.children.items():
            if key not in kinds:
                hint = format_suggestion(key, SERVER_KINDS, f"move it into {kinds[0]} and its implementation")
                self._problems.add(child.place, f"{name}.{key} is not a kind of server{hint}")
        return kinds[0]

    def _get_implementation(self, name: str, kind: ServerKind, node: YamlNode) -> str | None:
        present, known = list(node.children), IMPLEMENTATIONS.get(kind)
        if len(present) != 1:
            listed = " and ".join(f"{name} ({node.children[name].place})" for name in present) or "none"
            choice = " or ".join(known or ("an environment's name",))
            advice = "keep one" if present else f"write {choice} in it"
            self._problems.add(node.place, f"{name}.{kind} needs one implementation, and has {listed}; {advice}")
            return None
        implementation = present[0]
        place = node.children[implementation].place
        if kind == MODELS and implementation in UNSUPPORTED_MODEL_SERVERS:
            advice = UNSUPPORTED_MODEL_SERVERS[implementation]
            self._problems.add(place, f"{name}: {implementation} has no equivalent in gymsdk; {advice}")
            return None
        if known is not None and implementation not in known:
            hint = format_suggestion(implementation, known, f"there are {', '.join(known)}")
            self._problems.add(place, f"{name}: {kind} has no implementation {implementation!r} here{hint}")
            return None
        return implementation

    def _check_keys(self, path: KeyPath, settings: YamlNode, unsupported: set[str]) -> None:
        """Report unknown keys: as an error in gymsdk's own model server and for misspellings, else as a warning."""
        used = fields.get_used_keys(path[2]) | {*resolve.get_reference_keys(path[1])}
        for key, node in settings.children.items():
            if key in used:
                continue
            if path[2] == "gymsdk_model" or fields.is_misspelling(key, used | unsupported):
                hint = format_suggestion(key, used | unsupported, f"it may hold {', '.join(sorted(used))}")
                self._problems.add(node.place, f"{format_key_path(path)} has no setting {key!r}{hint}")
            else:
                self._problems.warn(
                    node.place, f"{format_key_path((*path, key))} is not known to gymsdk and is ignored"
                )

    def _read_kind_settings(
        self, kind: ServerKind, path: KeyPath, settings: YamlNode
    ) -> ResourcesServerConfig | ModelServerConfig | AgentServerConfig | None:
        if kind == MODELS:
            return read_model_server(path[2], settings, self._policy, path, self._problems)
        if kind == RESOURCES:
            mcp = settings.get(MCP_KEY)
            values: dict[str, Any] = {"environment": resolve_environment_name(path[2])}
            values |= {"mcp": mcp.value} if mcp else {}
            return self._validate(ResourcesServerConfig, values, *path)
        other = "deadline" if kind == ENVIRONMENTS else fields.EPISODE_TIMEOUT_KEY
        return self._validate(AgentServerConfig, read_fields(settings, AgentServerConfig, without={other}), *path)

    def _read_datasets(self, path: KeyPath, body: YamlNode) -> Iterator[DatasetConfig]:
        node = body.get("datasets")
        if node is None or node.value is None:
            return
        if not isinstance(node.value, list):
            self._problems.add(node.place, f"{format_key_path(path)}.datasets must be a list of name and jsonl_fpath")
            return
        for index, item in enumerate(node.value):
            values = read_fields(item, DatasetConfig)
            if isinstance(file := values.get("path"), str):
                values["path"] = self._folder / file
            values["place"] = item.place
            dataset = self._validate(DatasetConfig, values, *path, "datasets", str(index))
            if dataset is not None:
                yield dataset
