"""Read configuration files, environment variables and overrides into a deployment, and check that it is consistent."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, TypeVar

from gymsdk.config import fields, show
from gymsdk.config.files import (
    INCLUDE_KEY,
    FileLoader,
    check_protected_settings,
    check_safety,
    find_untrusted_references,
    is_readable_by_others,
    read_includes,
)
from gymsdk.config.model import (
    AGENTS,
    ENVIRONMENTS,
    MODELS,
    POLICY_SERVER,
    RESOURCES,
    SERVER_KINDS,
    Deployment,
    PolicyConfig,
    ServerConfig,
    ServerKind,
    find_kind,
)
from gymsdk.config.overrides import API_KEY_SETTING, Override, apply_environment, apply_overrides, parse_overrides
from gymsdk.config.resolve import apply_inheritance, find_referenced_keys, iter_references, resolve_references
from gymsdk.config.sections import DeploymentReader, ServerReader, is_server
from gymsdk.config.servers import TOP_LEVEL_SETTINGS, remove_unsupported
from gymsdk.config.show import list_settings
from gymsdk.config.yaml import (
    COMMAND_LINE,
    DEFAULT_PLACE,
    HANDED_OVER,
    MIN_SECRET_CHARS,
    Place,
    Problems,
    YamlNode,
    build_node,
    format_key_path,
    merge_nodes,
    remove_deleted,
)
from gymsdk.errors import format_name, format_suggestion
from gymsdk.http.tls import WILDCARD_HOSTS
from gymsdk.models.options import ENV_FILES, ENVIRONMENT_VARIABLES
from gymsdk.working_folder import get_working_folder

REQUIRED_REFERENCES: dict[ServerKind, tuple[tuple[str, ServerKind], ...]] = {
    AGENTS: (("resources_server", RESOURCES), ("model_server", MODELS)),
    ENVIRONMENTS: (("agent_server", AGENTS), ("resources_server", RESOURCES)),
}
"""The references that servers of a kind need: the key, and the kind of the other server."""

T = TypeVar("T")


def load_config(
    paths: Sequence[Path | str] = (),
    overrides: Sequence[str] = (),
    *,
    folder: Path | None = None,
    played: bool = False,
    environments: Iterable[str] = (),
) -> Deployment:
    """Read the deployment in configuration files, with overrides applied.

    The `env.yaml` and `.env.yaml` of the folder override the files. They must not set what the module `files`
    lists, unless *paths* name them.

    Args:
        paths: The configuration files; each may include others under `config_paths`.
        overrides: Overrides as on the command line.
        folder: The folder in which files are looked up, by default the current one.
        played: Whether the caller provides the policy. The policy's model server may then be missing or invalid: a
            scripted policy stands in for it.
        environments: The names of environments that are served, too. The overrides reach them as servers of the files.

    Raises:
        BadConfig: The configuration is invalid. The message has one line per error.
    """
    problems, home = Problems(), folder or get_working_folder()
    parsed = parse_overrides(overrides, problems)
    entries = [*((str(path), COMMAND_LINE) for path in paths), *_list_included_files(parsed, problems)]
    files = _add_environments(_load_files(entries, home, problems), environments)
    root = _apply(parsed, files, problems)
    deployment = _build_deployment(root, home, problems, played=played)
    return deployment.model_copy(update={"notes": (*deployment.notes, *_warn_of_exposed_secrets(parsed))})


def load_config_mapping(
    config: Mapping[str, Any],
    overrides: Sequence[str] = (),
    *,
    folder: Path | None = None,
    env_file: Path | None = None,
    reads_env: bool = True,
) -> Deployment:
    """Read the deployment in a configuration that a program passes, as trainers do.

    Args:
        config: A mapping, or an OmegaConf configuration. It overrides the files.
        overrides: Overrides as on the command line; they override *config*.
        folder: The folder in which its `config_paths` are looked up, by default the current one.
        env_file: A file to read instead of the `env.yaml` of the folder.
        reads_env: Whether to read that file at all.

    Raises:
        BadConfig: The configuration is invalid. The message has one line per error.
    """
    problems, home = Problems(), folder or get_working_folder()
    handed_over = fields.normalize_keys(build_node(_to_mapping(config), HANDED_OVER))
    parsed = parse_overrides(overrides, problems)
    entries = [*read_includes(handed_over, problems), *_list_included_files(parsed, problems)]
    files = _load_files(entries, home, problems, env_file=env_file, reads_env=reads_env)
    root = merge_nodes(files, handed_over.without(INCLUDE_KEY))
    return _build_deployment(_apply(parsed, root, problems), home, problems)


def check_environments(deployment: Deployment, installed: Collection[str]) -> None:
    """Raise an error if the deployment uses an environment that is not *installed*.

    Raises:
        BadConfig: An environment is not installed. The message has one line per server.
    """
    problems = Problems()
    for server in deployment.get_servers(RESOURCES):
        name = getattr(server.kind_settings, "environment", server.implementation)
        # A name on the command line has its own error when the environment is loaded.
        if name not in installed and server.is_in_files:
            hint = format_suggestion(
                name, installed, "`gymsdk list` shows the installed ones; environments are packages"
            )
            problems.add(server.place, f"{server.name}: no environment named {name!r} is installed{hint}")
    problems.raise_if_any()


def find_judge_servers(servers: Iterable[ServerConfig]) -> set[str]:
    """Return the names of the model servers that environments use, as a judge or a user; none is the policy."""
    return {name for server in servers for name in server.models.values()}


def check_server_references(
    written: YamlNode, root: YamlNode, servers: Collection[ServerConfig], problems: Problems
) -> None:
    """Report references to servers that do not exist or are of another kind.

    Args:
        written: The configuration before invalid servers were removed; references to those are not reported.
        root: The resolved configuration.
        servers: The servers that were read from it.
        problems: Receives the errors.
    """
    # The kinds come from the configuration, not from *servers*, which lack invalid servers.
    kinds = {name: set(node.children) for name, node in root.children.items()}
    for server in servers:
        for key, kind, name, node in iter_references(root, server):
            is_removed = name not in kinds and name in written.children
            if is_removed or kind in kinds.get(name, ()):
                continue
            candidates = [candidate for candidate, its_kinds in kinds.items() if kind in its_kinds]
            hint = format_suggestion(name, candidates, _suggest_server(name, kind, candidates))
            problems.add(node.place, f"{server.name}.{key} refers to {name!r}, which is none of the {kind}{hint}")


def _suggest_server(name: str, kind: str, candidates: Collection[str]) -> str:
    if (name, kind) == (POLICY_SERVER, MODELS):
        # NeMo Gym's files of environments expect another file to define the policy.
        return f"add a file that has {POLICY_SERVER} (--config FILE), or name the policy: --model scripted/oracle"
    return f"name one of {', '.join(candidates)}" if candidates else f"add a server {name}"


def fill_references(servers: Iterable[ServerConfig]) -> tuple[ServerConfig, ...]:
    """Return *servers* with missing references added, where there is only one server that they can mean."""
    known = tuple(servers)
    filled = tuple(server.model_copy(update={"refers": dict(_infer_references(server, known))}) for server in known)
    agents = {server.name: server.refers for server in filled if server.kind == AGENTS}
    return tuple(_use_resources_of_agent(server, agents) for server in filled)


def _use_resources_of_agent(server: ServerConfig, agents: Mapping[str, Mapping[str, str]]) -> ServerConfig:
    """Return an environment server that names no resources server with that of its agent; others as they are."""
    resources = agents.get(server.refers.get("agent_server", ""), {}).get("resources_server")
    if server.kind != ENVIRONMENTS or resources is None:
        return server
    return server.model_copy(update={"refers": {"resources_server": resources, **server.refers}})


def _infer_references(server: ServerConfig, servers: Collection[ServerConfig]) -> Iterator[tuple[str, str]]:
    yield from server.refers.items()
    for key, kind in REQUIRED_REFERENCES.get(server.kind, ()):
        excluded = find_judge_servers(servers) - {POLICY_SERVER}
        names = [other.name for other in servers if other.kind == kind and other.name not in excluded]
        if kind == MODELS and POLICY_SERVER in names:
            names = [POLICY_SERVER]
        if key not in server.refers and len(names) == 1:
            yield key, names[0]


def find_port_errors(ports: Iterable[tuple[str, str, int, T]], disallowed: Collection[int]) -> Iterator[tuple[T, str]]:
    """Yield an error for each port that two servers use, and for each that is *disallowed*.

    Args:
        ports: The name, the host, the port and the place of each server with a port.
        disallowed: The ports that no server may use.
    """
    used: dict[int, list[tuple[str, str]]] = {}
    for name, host, port, place in ports:
        if port in disallowed:
            yield place, f"{name} has port {port}, which disallowed_ports forbids; choose another"
        for other, other_host in used.setdefault(port, []):
            if host == other_host or {host, other_host} & WILDCARD_HOSTS:
                yield place, f"{name} and {other} both have port {port} of {host}; give one of them another"
        used[port].append((name, host))


def _list_ports(root: YamlNode, deployment: Deployment) -> Iterator[tuple[str, str, int, Place]]:
    """Yield name, host, port and place of every server with a port."""
    head_host, head_port = deployment.head_address
    if head_port:
        yield "head_server", head_host, head_port, root.place_of(("head_server", "port"))
    for server in deployment.servers:
        if server.port:
            place = root.place_of((server.name, server.kind, server.implementation, "port"))
            yield server.name, server.host or deployment.host, server.port, place


def _to_mapping(config: Mapping[str, Any]) -> Any:
    from omegaconf import OmegaConf

    return OmegaConf.to_container(config, resolve=False) if OmegaConf.is_config(config) else dict(config)


def _warn_of_exposed_secrets(overrides: Iterable[Override]) -> Iterator[str]:
    """Yield a warning for each secret among *overrides*; a reference to a variable is not a secret."""
    for override in overrides:
        value = override.value.value if override.value is not None else None
        if not isinstance(value, str) or len(value) < MIN_SECRET_CHARS or "${" in value:
            continue
        if show.is_secret(override.path):
            is_policy_key = override.path == (API_KEY_SETTING,)
            instead = (
                f"{ENVIRONMENT_VARIABLES[API_KEY_SETTING]}, or env.yaml" if is_policy_key else "a file, or env.yaml"
            )
            yield show.format_exposure_warning(format_key_path(override.path), instead)


def _replace_policy(root: YamlNode) -> YamlNode:
    """Return *root* with a scripted policy, unless a server of another kind has the policy's name."""
    server = root.get(POLICY_SERVER)
    if server is not None and MODELS not in server.children:
        return root
    scripted = {MODELS: {"gymsdk_model": {"model": "scripted/oracle"}}}
    return root.with_key(POLICY_SERVER, build_node(scripted, COMMAND_LINE))


def names_files(words: Iterable[str]) -> bool:
    """Return whether the overrides *words* name configuration files, as NeMo Gym's command does."""
    return any(override.path == (INCLUDE_KEY,) for override in parse_overrides(words, Problems()))


def _list_included_files(overrides: Iterable[Override], problems: Problems) -> list[tuple[str, Place]]:
    """Return the files that *overrides* of `config_paths` name."""
    values = [
        override.value for override in overrides if override.path == (INCLUDE_KEY,) and override.value is not None
    ]
    return [
        entry
        for override in values
        for entry in read_includes(YamlNode({INCLUDE_KEY: override}, COMMAND_LINE), problems)
    ]


def _add_environments(root: YamlNode, names: Iterable[str]) -> YamlNode:
    """Return *root* with a resources server for each environment in *names* that has none of its name."""
    for name in names:
        if root.get(name) is None:
            root = root.with_key(name, build_node({RESOURCES: {name: {}}}, DEFAULT_PLACE))
    return root


def _apply(overrides: Iterable[Override], root: YamlNode, problems: Problems) -> YamlNode:
    """Return *root* with all *overrides* applied but those that name files."""
    return apply_overrides(root, [override for override in overrides if override.path != (INCLUDE_KEY,)], problems)


def _load_files(
    entries: list[tuple[str, Place]],
    folder: Path,
    problems: Problems,
    *,
    env_file: Path | None = None,
    reads_env: bool = True,
) -> YamlNode:
    """Return the settings of the files *entries*, overridden by *env_file* or by the `env.yaml` of the folder."""
    loader = FileLoader(folder, problems)
    layers = [*loader.load_files(entries)]
    if env_file is not None and reads_env:
        layers += loader.load_file(env_file)
    named = reduce(merge_nodes, layers, YamlNode({}, DEFAULT_PLACE))
    found_files = ENV_FILES if env_file is None and reads_env else ()
    found_layers = [layer for name in found_files for layer in loader.load_file(folder / name, untrusted=True)]
    problems.raise_if_any()
    merged = reduce(merge_nodes, found_layers, named)
    check_protected_settings(named, merged, problems)
    return merged


def _build_deployment(root: YamlNode, folder: Path, problems: Problems, *, played: bool = False) -> Deployment:
    root = remove_deleted(apply_inheritance(root, problems))
    # If a `${policy_model.…}` refers to the policy's server, the server must stay until references are resolved.
    root = _replace_policy(root) if played and POLICY_SERVER not in find_referenced_keys(root) else root
    root, notes = apply_environment(fields.restore_texts(root))
    notes += _warn_of_readable_key(root, folder)
    problems.secrets |= show.find_secrets(root)
    settings_root, ignored = _remove_unknown_keys(root, problems)
    # With the keys that gymsdk does not use: a variable is secret, too, if a secret of another program comes from it.
    uses = show.VariableUses(root)
    # Resolving untrusted references would read environment variables.
    if problems.add_all(find_untrusted_references(settings_root, (), settings_root)):
        problems.raise_if_any()
    settings_root = _resolve(settings_root, problems)
    settings_root = _replace_policy(settings_root) if played else settings_root
    deployment = DeploymentReader(settings_root, folder, problems).read()
    reader = ServerReader(settings_root, deployment.policy, folder, problems)
    servers = reader.read()
    check_server_references(root, settings_root, servers, problems)
    deployment = deployment.model_copy(
        update={
            "servers": fill_references(servers),
            "notes": (*notes, *problems.warnings),
            "ignored": dict(sorted({**reader.ignored, **ignored}.items())),
        }
    )
    ports = _list_ports(settings_root, deployment)
    problems.add_all(find_port_errors(ports, deployment.port_range.disallowed))
    problems.raise_if_any()
    settings = list_settings(settings_root, deployment, problems.secrets, uses)
    return deployment.model_copy(update={"settings": settings})


def _resolve(root: YamlNode, problems: Problems) -> YamlNode:
    """Return *root* with references resolved; raise the errors if some do not resolve."""
    unresolved = Problems()
    resolved = fields.restore_texts(resolve_references(root, unresolved, absent=tuple(fields.list_keys(PolicyConfig))))
    problems.secrets |= show.find_secrets(resolved)
    check_safety(resolved, problems)
    if unresolved:
        # Unresolved values would cause misleading errors in later checks.
        problems.merge(unresolved)
        problems.raise_if_any()
    return resolved


def _warn_of_readable_key(root: YamlNode, folder: Path) -> tuple[str, ...]:
    key = root.get(API_KEY_SETTING)
    if key is None or not key.value or key.place.line is None:
        return ()
    file = key.place.source
    if not is_readable_by_others(folder / file):
        return ()
    return (f"{file} has a key that other users can read; run: chmod 600 {file}",)


def _remove_unknown_keys(root: YamlNode, problems: Problems) -> tuple[YamlNode, dict[str, Place]]:
    """Return *root* without the keys that gymsdk does not use, and the places of NeMo Gym's among them.

    Another key is an error if it is likely a mistake, else a warning.
    """
    root = remove_unsupported(root, (), TOP_LEVEL_SETTINGS, problems)
    referenced = find_referenced_keys(root)
    unknown = {
        key: node
        for key, node in root.children.items()
        if key not in fields.TOP_LEVEL_KEYS and key not in referenced and not is_server(node)
    }
    ignored = {key: node.place for key, node in unknown.items() if fields.is_ignored_key(key)}
    for key, node in unknown.items():
        if key in ignored:
            continue
        # Other programs read `env.yaml`, too. Only a key that differs by a letter counts as a misspelling of ours;
        # `judge_api_key` is not one of `policy_api_key`.
        is_misspelled = fields.is_misspelling(key, fields.TOP_LEVEL_KEYS)
        if node.place == COMMAND_LINE or is_misspelled or _looks_like_server(node):
            # On the command line, the key may be a misspelled server.
            servers = [key for key in root.children if key not in unknown] if node.place == COMMAND_LINE else []
            problems.add(node.place, _describe_unknown_key(key, node, servers))
        elif node.place.source not in ENV_FILES:
            problems.warn(node.place, f"{format_name(key)} is not known to gymsdk and is ignored")
    return root.without(*unknown), ignored


def _looks_like_server(node: YamlNode) -> bool:
    return any(find_kind(key) or format_suggestion(key, SERVER_KINDS) for key in node.children)


def _describe_unknown_key(key: str, node: YamlNode, servers: Iterable[str]) -> str:
    kinds = [kind for key in node.children if (kind := find_kind(key))]
    if kinds:
        return f"{key} has no kind of server; write {kinds[0]}: above {next(iter(node.children))}:"
    hint = next(filter(None, (format_suggestion(key, SERVER_KINDS) for key in node.children)), "")
    if hint:
        return f"{key} has no kind of server{hint}"
    known = (*fields.TOP_LEVEL_KEYS, *fields.IGNORED_TOP_LEVEL_KEYS, *servers)
    form = "a server is written NAME: {KIND: {IMPLEMENTATION: {…}}}" if node.is_mapping else ""
    hint = format_suggestion(key, known, form) or "; leave it out, or refer to it with ${" + format_name(key) + "}"
    return f"there is no setting {format_name(key)!r}{hint}"
