"""The top: the settings of a whole deployment, beside its servers."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, SecretStr

from gymsdk.configuration.checking import checked, given, is_given
from gymsdk.configuration.deployment import HEAD, LOCAL, AnyPort, Deployment, Head, Logs, Policy, Port, Ports, Tls
from gymsdk.configuration.nodes import Node, plain
from gymsdk.configuration.places import Problems
from gymsdk.configuration.players import urls
from gymsdk.errors import suggestion

HEAD_SERVER = "head_server"
HEAD_KEYS = ("host", "port")
LOWEST, HIGHEST = 1024, 65535
"""The ends of a range of ports that are not given."""
SIMPLE = ("default_host", "advertise_host", "token_file", "insecure")


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


def read(root: Node, folder: Path, problems: Problems) -> Deployment:
    """Give the deployment *root* describes, its servers left out; paths are taken from *folder*."""
    return _Reading(root, folder, problems).deployment()


class _Reading:
    """One reading of the top of *root*."""

    def __init__(self, root: Node, folder: Path, problems: Problems) -> None:
        self._root = root
        self._folder = folder
        self._problems = problems
        self._values: dict[str, Any] = {
            key: plain(node) for key, node in root.children.items() if is_given(node) and node.value != ""
        }

    def deployment(self) -> Deployment:
        switches = self._checked(_Switches, self._values, {}) or _Switches()
        values = {key: self._values[key] for key in SIMPLE if key in self._values}
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
            "policy": Policy(
                base_urls=urls(switches.policy_base_url),
                model_name=switches.policy_model_name,
                api_key=switches.policy_api_key,
            ),
        }
        return found.model_copy(update=parts)

    def _checked(self, kind: type[Any], values: dict[str, Any], keys: dict[str, str]) -> Any:
        return checked(kind, values, keys=keys, root=self._root, trail=(), problems=self._problems)

    def _head(self, default_host: str) -> Head:
        node = self._root.get(HEAD_SERVER)
        if node is None or node.value is None:
            return Head(host=default_host)
        if not node.is_mapping:
            self._problems.add(node.place, "head_server must hold host and port, as in head_server: {port: 11000}")
            return Head(host=default_host)
        for key, each in node.children.items():
            if key not in {*HEAD_KEYS, "num_workers"}:
                near = suggestion(key, HEAD_KEYS, "it has host and port")
                self._problems.add(each.place, f"head_server has no setting {key!r}{near}")
        said = given(node, {key: key for key in HEAD_KEYS})
        named = {key: f"{HEAD_SERVER}.{key}" for key in HEAD_KEYS}
        found = self._checked(_Head, {"host": default_host, "port": HEAD} | said, named)
        return Head(host=found.host, port=found.port, given=True) if found else Head(host=default_host)

    def _tls(self) -> Tls | None:
        names = {"certificate": "tls_certificate", "key": "tls_key"}
        paths = {field: self._folder / str(self._values[key]) for field, key in names.items() if key in self._values}
        if len(paths) == 1:
            [there] = (names[field] for field in paths)
            [absent] = (key for key in names.values() if key != there)
            place = self._root.place_of((there,))
            self._problems.add(place, f"{there} is given without {absent}; TLS needs both, give {absent} too")
        return Tls(**paths) if len(paths) == len(names) else None

    def _ports(self) -> Ports:
        found = self._checked(_Range, self._values, {}) or _Range()
        low, high = found.port_range_low, found.port_range_high
        if low is not None and high is not None and low > high:
            place = self._root.place_of(("port_range_low",))
            self._problems.add(place, f"port_range_low {low} is above port_range_high {high}; swap them")
        # Half a range goes to an end that every user may have, ports to be left out leave the rest.
        if (low, high) != (None, None) or found.disallowed_ports:
            low, high = LOWEST if low is None else low, HIGHEST if high is None else high
        return Ports(low=low, high=high, disallowed=found.disallowed_ports)

    def _logs(self) -> Logs:
        folder = "log_dir" if "log_dir" in self._values else "nemo_gym_log_dir"
        names = {"level": "log_level", "format": "log_format", "folder": folder}
        said = {field: self._values[key] for field, key in names.items() if key in self._values}
        said |= {"level": str(said["level"]).lower()} if "level" in said else {}
        found: Logs | None = self._checked(Logs, said | self._path(folder, "folder"), names)
        return found or Logs()

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
        return LOCAL
