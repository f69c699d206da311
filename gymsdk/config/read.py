"""Reading: files, variables and overrides become a deployment, or all that is wrong with them is told."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

from gymsdk.config import fields, redaction, sections, untrusted
from gymsdk.config import overrides as policy
from gymsdk.config import servers as unsupported
from gymsdk.config.files import INCLUDE_KEY, FileLoader, is_readable_by_others, read_includes
from gymsdk.config.model import (
    AGENTS,
    ENVIRONMENTS,
    MODELS,
    POLICY_SERVER,
    RESOURCES,
    SERVER_KINDS,
    Deployment,
    HeadConfig,
    ServerConfig,
    ServerKind,
    find_kind,
    normalize_keys,
)
from gymsdk.config.overrides import Override, apply_overrides, parse_overrides
from gymsdk.config.resolve import apply_inheritance, find_referenced_keys, iter_references, resolve_references
from gymsdk.config.sections import ServerReader, is_server
from gymsdk.config.show import list_settings
from gymsdk.config.yaml import (
    COMMAND_LINE,
    DEFAULT_PLACE,
    HANDED_OVER,
    MIN_SECRET_CHARS,
    Node,
    Place,
    Problems,
    build_node,
    format_key_path,
    merge_nodes,
    remove_deleted,
)
from gymsdk.errors import format_suggestion
from gymsdk.http.tls import WILDCARD_HOSTS
from gymsdk.models.options import ENV_FILES, ENVIRONMENT_VARIABLES

REQUIRED_REFERENCES: dict[ServerKind, tuple[tuple[str, ServerKind], ...]] = {
    AGENTS: (("resources_server", RESOURCES), ("model_server", MODELS)),
    ENVIRONMENTS: (("agent_server", AGENTS), ("resources_server", RESOURCES)),
}
"""What a server of a kind refers to."""


def check_server_references(written: Node, root: Node, blocks: Collection[ServerConfig], problems: Problems) -> None:
    """Tell of references to servers that are not there, or are of another kind.

    Of what is *written* but not in *root* it has been told already that it is wrong.
    """
    # By the shape of the file, not by what was read: a block that is wrong itself is there.
    kinds = {name: set(node.children) for name, node in root.children.items()}
    for block in blocks:
        for key, kind, name, node in iter_references(root, block):
            wrong = name not in kinds and name in written.children
            if wrong or kind in kinds.get(name, ()):
                continue
            there = [each for each, its in kinds.items() if kind in its]
            near = format_suggestion(name, there, _what_to_add(name, kind, there))
            problems.add(node.place, f"{block.name}.{key} refers to {name!r}, which is none of the {kind}{near}")


def _what_to_add(name: str, kind: str, there: Collection[str]) -> str:
    if (name, kind) == (POLICY_SERVER, MODELS):
        # NeMo Gym's files of environments leave it to another file.
        return f"add a file that has {POLICY_SERVER} (--config FILE), or say who plays: --model scripted/oracle"
    return f"name one of {', '.join(there)}" if there else f"add a block {name}"


def fill_references(blocks: Iterable[ServerConfig]) -> tuple[ServerConfig, ...]:
    """Give *blocks* with the references they leave out, where only one server can be meant."""
    known = tuple(blocks)
    return tuple(block.model_copy(update={"refers": {**dict(_meant(block, known)), **block.refers}}) for block in known)


def find_judge_servers(blocks: Iterable[ServerConfig]) -> set[str]:
    """Give the names of the model servers that environments ask, for a judge or a user: none of them is the policy."""
    return {name for block in blocks for name in block.models.values()}


def _meant(block: ServerConfig, blocks: Collection[ServerConfig]) -> Iterator[tuple[str, str]]:
    for key, kind in REQUIRED_REFERENCES.get(block.kind, ()):
        names = [
            each.name
            for each in blocks
            if each.kind == kind and each.name not in find_judge_servers(blocks) - {POLICY_SERVER}
        ]
        if kind == MODELS and POLICY_SERVER in names:
            names = [POLICY_SERVER]
        if key not in block.refers and len(names) == 1:
            yield key, names[0]


def check_ports(root: Node, deployment: Deployment, problems: Problems) -> None:
    """Tell of ports that two would have, or nobody may have."""
    taken: dict[int, list[tuple[str, str]]] = {}
    for name, host, port, place in _listening(root, deployment.head, deployment):
        if port in deployment.ports.disallowed:
            problems.add(place, f"{name} has port {port}, which disallowed_ports forbids; choose another")
        for other, its in taken.setdefault(port, []):
            if host == its or {host, its} & WILDCARD_HOSTS:
                problems.add(place, f"{name} and {other} both have port {port} of {host}; give one of them another")
        taken[port].append((name, host))


def _listening(root: Node, head: HeadConfig, deployment: Deployment) -> Iterator[tuple[str, str, int, Place]]:
    if head.port:
        yield "head_server", head.host, head.port, root.place_of(("head_server", "port"))
    for block in deployment.servers:
        if block.port:
            place = root.place_of((block.name, block.kind, block.implementation, "port"))
            yield block.name, block.host or deployment.default_host, block.port, place


def check_environments(deployment: Deployment, installed: Collection[str]) -> None:
    """Raise `BadConfig` where an environment is not among those *installed*."""
    problems = Problems()
    for block in deployment.get_servers(RESOURCES):
        name = getattr(block.part, "environment", block.implementation)
        if name not in installed:
            near = format_suggestion(name, installed, "`gymsdk list` names those that are; environments are packages")
            problems.add(block.place, f"{block.name}: no environment named {name!r} is installed{near}")
    problems.raise_if_any()


EMPTY_NODE = Node({}, DEFAULT_PLACE)


def load_config(
    paths: Sequence[Path | str] = (),
    overrides: Sequence[str] = (),
    *,
    folder: Path | None = None,
    played: bool = False,
) -> Deployment:
    """Give the deployment that *paths* describe, those of `config_paths` included, with *overrides* laid over it.

    Files are looked up in *folder*, by default the current one, whose `env.yaml` and `.env.yaml` win over them. Those
    two may not set what `untrusted` lists, unless *paths* name them. Where
    it is *played* by a model that is named otherwise, the policy's model server need not be there, nor be right: a
    scripted policy stands for it. Raises `BadConfig` with a line for everything that is wrong.
    """
    problems, home = Problems(), folder or Path()
    given = parse_overrides(overrides, problems)
    entries = [(str(path), COMMAND_LINE) for path in paths]
    entries += [entry for each in given if each.trail == (INCLUDE_KEY,) for entry in _entries(each, problems)]
    under = _files(entries, home, problems)
    rest = [each for each in given if each.trail != (INCLUDE_KEY,)]
    found = _deployment(apply_overrides(under, rest, problems), home, problems, played=played)
    return found.model_copy(update={"notes": (*found.notes, *_exposed(rest))})


def load_config_mapping(
    given: Mapping[str, Any], *, folder: Path | None = None, env_file: Path | None = None
) -> Deployment:
    """Give the deployment that a program hands over, as trainers do: a mapping, or OmegaConf's own.

    Its `config_paths` are looked up in *folder*, by default the current one; *env_file*, if named, is read instead of
    the folder's `env.yaml`. What is *given* wins over both. Raises `BadConfig`.
    """
    problems, home = Problems(), folder or Path()
    over = normalize_keys(build_node(_plain(given), HANDED_OVER))
    under = _files(read_includes(over, problems), home, problems, env_file=env_file)
    return _deployment(merge_nodes(under, over.without(INCLUDE_KEY)), home, problems)


def _plain(given: Mapping[str, Any]) -> Any:
    from omegaconf import OmegaConf

    return OmegaConf.to_container(given, resolve=False) if OmegaConf.is_config(given) else dict(given)


def _exposed(overrides: Iterable[Override]) -> Iterator[str]:
    """Yield a sentence for each secret among *overrides*; one that only refers to a variable is none."""
    for each in overrides:
        value = each.value.value if each.value is not None else None
        if (
            isinstance(value, str)
            and len(value) >= MIN_SECRET_CHARS
            and "${" not in value
            and redaction.is_secret(each.trail)
        ):
            instead = (
                f"{ENVIRONMENT_VARIABLES[policy.API_KEY_SETTING]}, or env.yaml"
                if each.trail == (policy.API_KEY_SETTING,)
                else "a file, or env.yaml"
            )
            yield redaction.format_exposure_warning(format_key_path(each.trail), instead)


def _played(root: Node) -> Node:
    """Give *root* with a policy that needs nothing, unless what is called so is of another kind."""
    there = root.get(POLICY_SERVER)
    if there is not None and MODELS not in there.children:
        return root
    return root.with_key(
        POLICY_SERVER, build_node({MODELS: {"gymsdk_model": {"model": "scripted/oracle"}}}, COMMAND_LINE)
    )


def _entries(override: Override, problems: Problems) -> list[tuple[str, Place]]:
    if override.value is None:
        return []
    return read_includes(Node({INCLUDE_KEY: override.value}, COMMAND_LINE), problems)


def _files(entries: list[tuple[str, Place]], folder: Path, problems: Problems, *, env_file: Path | None = None) -> Node:
    """Give the settings of the files *entries*, and over them those of *env_file* or of the folder's own files."""
    files = FileLoader(folder, problems)
    layers = [*files.load_files(entries)]
    if env_file is not None:
        layers += files.load_file(env_file)
    named = reduce(merge_nodes, layers, EMPTY_NODE)
    found = [] if env_file else [layer for name in ENV_FILES for layer in files.load_file(folder / name, found=True)]
    problems.raise_if_any()
    whole = reduce(merge_nodes, found, named)
    untrusted.check_protected_settings(named, whole, problems)
    return whole


def _deployment(root: Node, folder: Path, problems: Problems, *, played: bool = False) -> Deployment:
    root = remove_deleted(apply_inheritance(root, problems))
    # What somebody refers to by `${policy_model.…}` has to be there until that is put in.
    root = _played(root) if played and POLICY_SERVER not in find_referenced_keys(root) else root
    root, notes = policy.apply_environment(root)
    notes += _readable(root, folder)
    problems.secrets |= redaction.find_secrets(root)
    known, ignored = _sorted_out(root, problems)
    unresolved, veils = Problems(), redaction.find_redacted(known)
    untrusted.check_untrusted_references(known, (), known, refused := Problems())
    if refused:
        # Resolving would read the environment variables that the file asks for.
        problems.merge(refused)
        problems.raise_if_any()
    known = resolve_references(known, unresolved, absent=fields.POLICY_KEYS)
    problems.secrets |= redaction.find_secrets(known)
    untrusted.check_safety(known, problems)
    if unresolved:
        # What does not resolve is missing further down: only it is told.
        problems.merge(unresolved)
        problems.raise_if_any()
    known = _played(known) if played else known
    found = sections.read_deployment(known, folder, problems)
    blocks = ServerReader(known, found.policy, folder, problems)
    servers = blocks.read()
    check_server_references(root, known, servers, problems)
    told = {"notes": (*notes, *problems.warnings), "ignored": dict(sorted({**blocks.ignored, **ignored}.items()))}
    whole = found.model_copy(update={"servers": fill_references(servers), **told})
    check_ports(known, whole, problems)
    problems.raise_if_any()
    return whole.model_copy(update={"settings": list_settings(known, whole, problems.secrets, veils)})


def _readable(root: Node, folder: Path) -> tuple[str, ...]:
    key = root.get(policy.API_KEY_SETTING)
    if key is None or not key.value or key.place.line is None or not is_readable_by_others(folder / key.place.source):
        return ()
    return (f"{key.place.source} holds a key that others can read; run: chmod 600 {key.place.source}",)


def _sorted_out(root: Node, problems: Problems) -> tuple[Node, dict[str, Place]]:
    """Return *root* without keys that mean nothing here, and the places of NeMo Gym's among those.

    Of the others, one that is likely a mistake goes to *problems* as an error, any other as a warning.
    """
    root = unsupported.remove_unsupported(root, (), unsupported.TOP_LEVEL_SETTINGS, problems)
    used = find_referenced_keys(root)
    unknown = {
        key: node
        for key, node in root.children.items()
        if key not in fields.TOP_LEVEL_KEYS and key not in used and not is_server(node)
    }
    ignored = {key: node.place for key, node in unknown.items() if fields.is_ignored_key(key)}
    for key, node in unknown.items():
        if key in ignored or _is_anothers(key, node):
            continue
        if _is_mistake(key, node):
            # On the command line a name near that of a server is a slip.
            near = [each for each in root.children if each not in unknown] if node.place == COMMAND_LINE else []
            problems.add(node.place, _complaint(key, node, near))
        else:
            problems.warn(node.place, f"{key} is not known to gymsdk and is ignored")
    return root.without(*unknown), ignored


def _is_mistake(key: str, node: Node) -> bool:
    """Whether unknown *key* was likely meant to have an effect: typed by hand, misspelled, or shaped like a server."""
    if node.place == COMMAND_LINE or fields.is_misspelling(key, fields.TOP_LEVEL_KEYS):
        return True
    return any(find_kind(each) or format_suggestion(each, SERVER_KINDS) for each in node.children)


def _is_anothers(key: str, node: Node) -> bool:
    """Whether *key* is some other program's: `env.yaml` is read by more than one, and is no place for a new server.

    What is off by a letter is a slip all the same; `judge_api_key` is somebody's, however near to `policy_api_key`.
    """
    if node.place.source not in ENV_FILES or fields.is_misspelling(key, fields.TOP_LEVEL_KEYS):
        return False
    return not any(find_kind(each) or format_suggestion(each, SERVER_KINDS) for each in node.children)


def _complaint(key: str, node: Node, servers: Iterable[str]) -> str:
    kinds = [kind for each in node.children if (kind := find_kind(each))]
    if kinds:
        return f"{key} says no kind of server; write {kinds[0]}: above {next(iter(node.children))}:"
    near = next(filter(None, (format_suggestion(each, SERVER_KINDS) for each in node.children)), "")
    if near:
        return f"{key} has no kind of server{near}"
    known = (*fields.TOP_LEVEL_KEYS, *fields.IGNORED_TOP_LEVEL_KEYS, *servers)
    told = format_suggestion(
        key, known, "a server is written NAME: {KIND: {IMPLEMENTATION: {…}}}" if node.is_mapping else ""
    )
    return f"there is no setting {key!r}{told or '; leave it out, or refer to it with ${' + key + '}'}"
