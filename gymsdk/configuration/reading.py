"""Reading: files, variables and overrides become a deployment, or all that is wrong with them is told."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

from gymsdk.configuration import keys, policy, top, unsupported, untrusted, veiling
from gymsdk.configuration.blocks import Blocks, is_block
from gymsdk.configuration.consistency import check_ports, check_references, completed
from gymsdk.configuration.deployment import Deployment
from gymsdk.configuration.files import INCLUDES, Files, included, open_to_others
from gymsdk.configuration.inheriting import inherited
from gymsdk.configuration.kinds import KINDS, MODELS, POLICY, kind_of, spelled
from gymsdk.configuration.nodes import Node, merged, node_of, swept
from gymsdk.configuration.overrides import Override, applied, parsed
from gymsdk.configuration.places import COMMAND, DEFAULT, HANDED, SHORTEST, Place, Problems, dotted
from gymsdk.configuration.resolving import referred, resolved
from gymsdk.configuration.showing import settings
from gymsdk.errors import suggestion
from gymsdk.settings import FILES, VARIABLES

EMPTY = Node({}, DEFAULT)


def read(
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
    given = parsed(overrides, problems)
    entries = [(str(path), COMMAND) for path in paths]
    entries += [entry for each in given if each.trail == (INCLUDES,) for entry in _entries(each, problems)]
    under = _files(entries, home, problems)
    rest = [each for each in given if each.trail != (INCLUDES,)]
    found = _deployment(applied(under, rest, problems), home, problems, played=played)
    return found.model_copy(update={"notes": (*found.notes, *_exposed(rest))})


def from_mapping(given: Mapping[str, Any], *, folder: Path | None = None, env_file: Path | None = None) -> Deployment:
    """Give the deployment that a program hands over, as trainers do: a mapping, or OmegaConf's own.

    Its `config_paths` are looked up in *folder*, by default the current one; *env_file*, if named, is read instead of
    the folder's `env.yaml`. What is *given* wins over both. Raises `BadConfig`.
    """
    problems, home = Problems(), folder or Path()
    over = spelled(node_of(_plain(given), HANDED))
    under = _files(included(over, problems), home, problems, env_file=env_file)
    return _deployment(merged(under, over.without(INCLUDES)), home, problems)


def _plain(given: Mapping[str, Any]) -> Any:
    from omegaconf import OmegaConf

    return OmegaConf.to_container(given, resolve=False) if OmegaConf.is_config(given) else dict(given)


def _exposed(overrides: Iterable[Override]) -> Iterator[str]:
    """Yield a sentence for each secret among *overrides*; one that only refers to a variable is none."""
    for each in overrides:
        value = each.value.value if each.value is not None else None
        if isinstance(value, str) and len(value) >= SHORTEST and "${" not in value and veiling.is_secret(each.trail):
            instead = f"{VARIABLES[policy.KEY]}, or env.yaml" if each.trail == (policy.KEY,) else "a file, or env.yaml"
            yield veiling.exposed(dotted(each.trail), instead)


def _played(root: Node) -> Node:
    """Give *root* with a policy that needs nothing, unless what is called so is of another kind."""
    there = root.get(POLICY)
    if there is not None and MODELS not in there.children:
        return root
    return root.with_key(POLICY, node_of({MODELS: {"gymsdk_model": {"model": "scripted/oracle"}}}, COMMAND))


def _entries(override: Override, problems: Problems) -> list[tuple[str, Place]]:
    if override.value is None:
        return []
    return included(Node({INCLUDES: override.value}, COMMAND), problems)


def _files(entries: list[tuple[str, Place]], folder: Path, problems: Problems, *, env_file: Path | None = None) -> Node:
    """Give the settings of the files *entries*, and over them those of *env_file* or of the folder's own files."""
    files = Files(folder, problems)
    layers = [*files.load_files(entries)]
    if env_file is not None:
        layers += files.load_file(env_file)
    named = reduce(merged, layers, EMPTY)
    found = [] if env_file else [layer for name in FILES for layer in files.load_file(folder / name, found=True)]
    problems.raise_if_any()
    whole = reduce(merged, found, named)
    untrusted.check_replaced(named, whole, problems)
    return whole


def _deployment(root: Node, folder: Path, problems: Problems, *, played: bool = False) -> Deployment:
    root = swept(inherited(root, problems))
    # What somebody refers to by `${policy_model.…}` has to be there until that is put in.
    root = _played(root) if played and POLICY not in referred(root) else root
    root, notes = policy.completed(root)
    notes += _readable(root, folder)
    problems.secrets |= veiling.secrets(root)
    known, ignored = _sorted_out(root, problems)
    unresolved, veils = Problems(), veiling.veiled(known)
    untrusted.check_references(known, (), known, refused := Problems())
    if refused:
        # Resolving would read the environment variables that the file asks for.
        problems.merge(refused)
        problems.raise_if_any()
    known = resolved(known, unresolved, absent=keys.POLICY)
    problems.secrets |= veiling.secrets(known)
    untrusted.check_safety(known, problems)
    if unresolved:
        # What does not resolve is missing further down: only it is told.
        problems.merge(unresolved)
        problems.raise_if_any()
    known = _played(known) if played else known
    found = top.read(known, folder, problems)
    blocks = Blocks(known, found.policy, folder, problems)
    servers = blocks.read()
    check_references(root, known, servers, problems)
    told = {"notes": (*notes, *problems.warnings), "ignored": dict(sorted({**blocks.ignored, **ignored}.items()))}
    whole = found.model_copy(update={"servers": completed(servers), **told})
    check_ports(known, whole, problems)
    problems.raise_if_any()
    return whole.model_copy(update={"settings": settings(known, whole, problems.secrets, veils)})


def _readable(root: Node, folder: Path) -> tuple[str, ...]:
    key = root.get(policy.KEY)
    if key is None or not key.value or key.place.line is None or not open_to_others(folder / key.place.source):
        return ()
    return (f"{key.place.source} holds a key that others can read; run: chmod 600 {key.place.source}",)


def _sorted_out(root: Node, problems: Problems) -> tuple[Node, dict[str, Place]]:
    """Return *root* without keys that mean nothing here, and the places of NeMo Gym's among those.

    Of the others, one that is likely a mistake goes to *problems* as an error, any other as a warning.
    """
    root = unsupported.without_unsupported(root, (), unsupported.TOP, problems)
    used = referred(root)
    unknown = {
        key: node
        for key, node in root.children.items()
        if key not in keys.USED and key not in used and not is_block(node)
    }
    ignored = {key: node.place for key, node in unknown.items() if keys.is_ignored(key)}
    for key, node in unknown.items():
        if key in ignored or _is_anothers(key, node):
            continue
        if _is_mistake(key, node):
            # On the command line a name near that of a server is a slip.
            near = [each for each in root.children if each not in unknown] if node.place == COMMAND else []
            problems.add(node.place, _complaint(key, node, near))
        else:
            problems.warn(node.place, f"{key} is not known to gymsdk and is ignored")
    return root.without(*unknown), ignored


def _is_mistake(key: str, node: Node) -> bool:
    """Whether unknown *key* was likely meant to have an effect: typed by hand, misspelled, or shaped like a server."""
    if node.place == COMMAND or keys.is_slip(key, keys.USED):
        return True
    return any(kind_of(each) or suggestion(each, KINDS) for each in node.children)


def _is_anothers(key: str, node: Node) -> bool:
    """Whether *key* is some other program's: `env.yaml` is read by more than one, and is no place for a new server.

    What is off by a letter is a slip all the same; `judge_api_key` is somebody's, however near to `policy_api_key`.
    """
    if node.place.source not in FILES or keys.is_slip(key, keys.USED):
        return False
    return not any(kind_of(each) or suggestion(each, KINDS) for each in node.children)


def _complaint(key: str, node: Node, servers: Iterable[str]) -> str:
    kinds = [kind for each in node.children if (kind := kind_of(each))]
    if kinds:
        return f"{key} says no kind of server; write {kinds[0]}: above {next(iter(node.children))}:"
    near = next(filter(None, (suggestion(each, KINDS) for each in node.children)), "")
    if near:
        return f"{key} has no kind of server{near}"
    known = (*keys.USED, *keys.IGNORED, *servers)
    told = suggestion(key, known, "a server is written NAME: {KIND: {IMPLEMENTATION: {…}}}" if node.is_mapping else "")
    return f"there is no setting {key!r}{told or '; leave it out, or refer to it with ${' + key + '}'}"
