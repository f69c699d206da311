"""Resolve a configuration: OmegaConf's `${…}`, NeMo Gym's inheritance, and references between servers."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gymsdk.config.model import AGENTS, ENVIRONMENTS, MODELS, RESOURCES, SERVER_KINDS, ServerConfig, ServerKind
from gymsdk.config.yaml import (
    KeyPath,
    Place,
    Problems,
    YamlNode,
    build_node,
    format_key_path,
    get_child,
    merge_nodes,
    to_plain,
)
from gymsdk.errors import format_suggestion
from gymsdk.models.options import INTERPOLATION_MARK

if TYPE_CHECKING:
    from omegaconf import DictConfig

VARIABLE_PATTERN = re.compile(r"\$\{oc\.env:\s*([A-Za-z_]\w*)\s*\}")
REFERENCE_PATTERN = re.compile(r"\$\{\s*([A-Za-z_][\w-]*(?:\.[\w-]+)*)\s*\}")
RESOLVER_PATTERN = re.compile(r"\$\{\s*([A-Za-z_][\w.]*):")
INHERIT_KEYS = ("_inherit_from", "_copy")
REFERENCE_KEYS: Mapping[str, ServerKind] = {
    "resources_server": RESOURCES,
    "model_server": MODELS,
    "agent_server": AGENTS,
}
"""The keys with which agents and environment servers refer to other servers, and the kinds of these servers."""

REFERENCE_FIELDS = {"type", "name"}


def apply_inheritance(root: YamlNode, problems: Problems) -> YamlNode:
    """Return *root* with `_inherit_from`, `_copy` and `${inherit_from:…}` applied; errors go to *problems*.

    Settings that were inherited, rather than copied, are removed from their original place.
    """
    inheritance = _Inheritance(root, problems)
    applied = inheritance.apply(root, ())
    for path in sorted(inheritance.moved, key=len, reverse=True):
        applied = applied.without_path(path)
    return applied


class _Inheritance:
    """Applies the inheritance in a configuration.

    Attributes:
        moved: The paths of the settings that were inherited rather than copied.
    """

    def __init__(self, root: YamlNode, problems: Problems) -> None:
        self.moved: set[KeyPath] = set()
        self._root = root
        self._problems = problems
        self._bases_in_progress: list[KeyPath] = []

    def apply(self, node: YamlNode, path: KeyPath) -> YamlNode:
        if isinstance(node.value, list):
            return YamlNode(
                [self.apply(child, (*path, str(index))) for index, child in enumerate(node.value)], node.place
            )
        if isinstance(node.value, str) and (
            match := re.fullmatch(r"\$\{(inherit_from|copy):\s*([^}\s]+)\s*\}", node.value)
        ):
            base = self._get_base(node, path, match[2], moves=match[1] == "inherit_from")
            return base or YamlNode(None, node.place)
        if not node.is_mapping:
            return node
        children = {
            key: self.apply(child, (*path, key)) for key, child in node.children.items() if key not in INHERIT_KEYS
        }
        merged = YamlNode({**children}, node.place)
        for key in INHERIT_KEYS:
            source = node.get(key)
            if source is not None and (
                base := self._get_base(source, path, source.to_text().value, moves=key == INHERIT_KEYS[0])
            ):
                merged = merge_nodes(YamlNode(base.value, node.place), merged)
        return merged

    def _get_base(self, marker: YamlNode, path: KeyPath, source: object, *, moves: bool) -> YamlNode | None:
        """Return the node at the path *source*, with inheritance applied to it too; `None` after an error.

        With *moves*, the node is recorded as moved.
        """
        source_path = tuple(str(source).split("."))
        base = self._root.get(*source_path)
        name = format_key_path(path)
        if base is None:
            hint = format_suggestion(str(source), self._root.children, "write the whole path of a key from the top")
            self._problems.add(marker.place, f"{name} inherits from {source}, which does not exist{hint}")
            return None
        if source_path in self._bases_in_progress or path[: len(source_path)] == source_path:
            self._problems.add(marker.place, f"{name} inherits from {source}, and so from itself; name another key")
            return None
        if moves:
            self.moved.add(source_path)
        # A base may inherit, too, and lead back to this one.
        self._bases_in_progress.append(source_path)
        try:
            return self.apply(base, source_path)
        finally:
            self._bases_in_progress.pop()


def expand_variables(text: str) -> str:
    """Return *text* with environment variables resolved, or unchanged if that fails."""
    if INTERPOLATION_MARK not in text:
        return text
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        return str(OmegaConf.create({"text": text}).text)
    except OmegaConfBaseException:
        return text


def find_referenced_keys(root: YamlNode) -> set[str]:
    """Return the top-level keys that `${…}` in *root* refers to."""
    texts = (node.value for _, node in root.leaves() if isinstance(node.value, str))
    return {name for text in texts for name in re.findall(r"\$\{([A-Za-z_]\w*)[.}\[]", text)}


def resolve_references(root: YamlNode, problems: Problems, absent: tuple[str, ...] = ()) -> YamlNode:
    """Return *root* with all `${…}` resolved; errors, including missing required values, go to *problems*.

    Args:
        problems: Receives the errors.
        absent: Top-level keys that may be absent; references to them resolve to null.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    def remove_unparseable(path: KeyPath, node: YamlNode) -> YamlNode:
        if not isinstance(node.value, str) or INTERPOLATION_MARK not in node.value:
            return node
        try:
            OmegaConf.create({"text": node.value})
        except OmegaConfBaseException:
            advice = "write ${key.of.another}"
            problems.add(node.place, f"{format_key_path(path)} has a ${{ without a matching }}; {advice}")
            return YamlNode(None, node.place)
        return node

    parseable = root.map(remove_unparseable)
    absent_values = dict.fromkeys(absent)
    config = OmegaConf.create(absent_values | to_plain(parseable))
    # In `v${version}`, the number 1.10 is text and must not become 1.1.
    texts = OmegaConf.create(absent_values | to_plain(parseable.to_text()))
    resolved = parseable.map(_Resolver(config, texts, parseable, problems).resolve)
    _report_missing(resolved, problems)
    return resolved


class _Resolver:
    """Resolves the texts of *root* with *config*, the same configuration in OmegaConf.

    In *texts*, a number or a truth value is the text in the file.
    """

    def __init__(self, config: DictConfig, texts: DictConfig, root: YamlNode, problems: Problems) -> None:
        self._config = config
        self._texts = texts
        self._root = root
        self._problems = problems
        self._origins = self._find_origins()
        self._add_computed_texts()

    def resolve(self, path: KeyPath, node: YamlNode) -> YamlNode:
        if isinstance(node.value, str) and INTERPOLATION_MARK in node.value:
            value, text = self._resolve_text(node.value, path, node.place)
            return _combine(value, text, self._get_place(node, path))
        return node

    def _get_place(self, node: YamlNode, path: KeyPath) -> Place:
        """Return the place of a resolved value, which is untrusted if the whole value comes from an untrusted file."""
        origin = self._origins.get(path)
        if origin is None:
            return node.place
        return node.place.model_copy(update={"origin": origin, "untrusted": self._is_untrusted(node, ())})

    def _is_untrusted(self, node: YamlNode, seen: tuple[YamlNode, ...]) -> bool:
        """Whether *node* comes from an untrusted file, or is nothing but a reference to a value of such a file."""
        if node.place.untrusted or any(node is other for other in seen):
            return node.place.untrusted
        if isinstance(node.value, (dict, list)):
            leaves = [leaf for _, leaf in node.leaves()]
            return bool(leaves) and all(self._is_untrusted(leaf, (*seen, node)) for leaf in leaves)
        match = REFERENCE_PATTERN.fullmatch(node.value) if isinstance(node.value, str) else None
        target: YamlNode | None = self._root if match else None
        for key in match[1].split(".") if match else ():
            target = get_child(target, key) if target is not None else None
        return target is not None and self._is_untrusted(target, (*seen, node))

    def _find_origins(self) -> dict[KeyPath, Place]:
        """Return the place of an untrusted value that a trusted text depends on, for each text that depends on one.

        Replaces each untrusted value in turn and compares the resolved texts, so that every form of reference counts,
        including nested and relative references.
        """
        leaves = list(self._root.leaves())
        texts = [
            path
            for path, leaf in leaves
            if isinstance(leaf.value, str) and INTERPOLATION_MARK in leaf.value and not leaf.place.untrusted
        ]
        origins: dict[KeyPath, Place] = {}
        untrusted = [(path, leaf) for path, leaf in leaves if leaf.place.untrusted]
        if not texts or not untrusted:
            return origins
        before = {path: self._try_resolve(path) for path in texts}
        for (*parent_path, last), leaf in untrusted:
            parent = self._select(tuple(parent_path))
            key = int(last) if _is_list(parent) else last
            parent[key] = "gymsdk-probe"
            for path in texts:
                if path not in origins and self._try_resolve(path) != before[path]:
                    origins[path] = leaf.place
            parent[key] = leaf.value
        return origins

    def _add_computed_texts(self) -> None:
        """Give the texts the values that resolvers of the user compute, because these may compute with numbers."""
        for (*parent_path, last), leaf in self._root.leaves():
            names = RESOLVER_PATTERN.findall(leaf.value) if isinstance(leaf.value, str) else ()
            if all(name.startswith("oc.") for name in names):
                continue
            resolves, value = self._try_resolve((*parent_path, last))
            if resolves and not (isinstance(value, str) and INTERPOLATION_MARK in value):
                parent = self._select(tuple(parent_path), self._texts)
                parent[int(last) if _is_list(parent) else last] = value

    def _try_resolve(self, path: KeyPath) -> tuple[bool, Any]:
        """Return whether the value at *path* resolves, and the resolved value."""
        from omegaconf.errors import OmegaConfBaseException

        try:
            return True, self._resolve_path(path)
        except (OmegaConfBaseException, RecursionError):
            return False, None

    def _resolve_text(self, text: str, path: KeyPath, place: Place) -> tuple[Any, Any]:
        """Return the resolved value, and the same with the texts in the files; `None` after an error."""
        from omegaconf.errors import OmegaConfBaseException

        try:
            value = self._resolve_path(path)
        except (OmegaConfBaseException, RecursionError) as error:
            # OmegaConf reports a cycle by these words only, not by a class.
            if isinstance(error, RecursionError) or "ecursive" in str(error):
                reason = "refers to itself; write the value"
            else:
                reason = f"has a reference that does not resolve: {self._explain(text)}"
            self._problems.add(place, f"{format_key_path(path)} {reason}")
            return None, None
        try:
            return value, self._resolve_path(path, self._texts)
        except OmegaConfBaseException:
            # A number is part of a path, as in `${list.${index}}`.
            return value, value

    def _resolve_path(self, path: KeyPath, config: DictConfig | None = None) -> Any:
        from omegaconf import OmegaConf

        value = self._select(path, config)
        return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value

    def _select(self, path: KeyPath, config: DictConfig | None = None) -> Any:
        value: Any = self._config if config is None else config
        for key in path:
            value = value[int(key)] if _is_list(value) else value[key]
        return value

    def _explain(self, text: str) -> str:
        """Return which reference in *text* is wrong and what to do, without default values, which may be secret."""
        from omegaconf import OmegaConf

        unset = [name for name in VARIABLE_PATTERN.findall(text) if name not in os.environ]
        if unset:
            return f"set the environment variable {unset[0]}, or write ${{oc.env:{unset[0]},DEFAULT}}"
        if unknown := next((name for name in RESOLVER_PATTERN.findall(text) if not OmegaConf.has_resolver(name)), None):
            known = ("oc.env", "inherit_from", "copy")
            advice = "write ${key.of.another}, or ${oc.env:VARIABLE}"
            return f"unknown resolver {unknown}:{format_suggestion(unknown, known, advice)}"
        for reference in REFERENCE_PATTERN.findall(text):
            if missing := self._find_missing_key(reference.split(".")):
                return missing
        return "give the whole path of a key from the top, and check that this key resolves"

    def _find_missing_key(self, path: list[str]) -> str:
        """Return a sentence about the first key of *path* that does not exist, an empty text if all exist."""
        for end, key in enumerate(path):
            parent = self._root.get(*path[:end])
            if parent is None or not parent.is_mapping:
                return ""
            if key not in parent.children:
                hint = format_suggestion(key, parent.children)
                return f"there is no {format_key_path(tuple(path[: end + 1]))!r}{hint}"
        return ""


def _combine(value: Any, text: Any, place: Place) -> YamlNode:
    """Return a resolved *value* as a node at *place*; *text* is the same value with the texts in the files."""
    if isinstance(value, dict):
        return YamlNode({str(key): _combine(child, text[key], place) for key, child in value.items()}, place)
    if isinstance(value, list):
        return YamlNode([_combine(child, text[index], place) for index, child in enumerate(value)], place)
    if isinstance(value, str):
        # A text that contains a reference to a number.
        return build_node(text, place)
    return replace(build_node(value, place), text=text if isinstance(text, str) else None)


def _is_list(value: object) -> bool:
    from omegaconf import ListConfig

    return isinstance(value, ListConfig)


def _report_missing(root: YamlNode, problems: Problems) -> None:
    """Report all required values that are missing in one error, at the place of the first."""
    missing = [(path, node.place) for path, node in root.leaves() if node.value == "???"]
    if not missing:
        return
    listed = ", ".join(f"{format_key_path(path)} ({place})" for path, place in missing)
    first_path, first_place = missing[0]
    first = format_key_path(first_path)
    problems.add(first_place, f"required values are ???: {listed}; write {first}=VALUE, or put them into env.yaml")


def get_reference_keys(kind: str) -> Mapping[str, ServerKind]:
    """Return the keys with which servers of *kind* refer to other servers.

    A resources server has none: its environment defines the settings.
    """
    return REFERENCE_KEYS if kind in {AGENTS, ENVIRONMENTS} else {}


def read_references(path: KeyPath, body: YamlNode, problems: Problems) -> dict[str, str]:
    """Return the name of each server that *body* refers to with `{type: KIND, name: NAME}`, by key.

    Args:
        path: The name, kind and implementation of the server.
        problems: Receives an error for each invalid reference.
    """
    references = {}
    for key, node in body.children.items():
        if node.value is None or not _is_reference(path[1], key, node):
            continue
        if (error := _check_reference(get_reference_keys(path[1]).get(key), node)) is not None:
            problems.add(error[0].place, f"{format_key_path((*path, key))}{error[1]}")
            continue
        references[key] = str(node.children["name"].value)
    return references


def iter_references(root: YamlNode, server: ServerConfig) -> Iterator[tuple[str, str, str, YamlNode]]:
    """Yield key, kind, name and node of every reference of *server*."""
    body = root.get(server.name, server.kind, server.implementation)
    for key in server.refers:
        if body is not None and (node := body.get(key)) is not None:
            yield key, str(node.children["type"].value), server.refers[key], node


def _is_reference(kind: str, key: str, node: YamlNode) -> bool:
    """Whether *node* under *key* of a server of *kind* is a reference, valid or not."""
    if kind in {AGENTS, ENVIRONMENTS}:
        return key in REFERENCE_KEYS
    if kind != RESOURCES or not node.children.keys() >= REFERENCE_FIELDS:
        return False
    # An environment defines its settings; a setting that looks like a reference may be something else.
    is_known_kind = node.children["type"].value in SERVER_KINDS
    return is_known_kind or (node.children.keys() == REFERENCE_FIELDS and key.endswith("_server"))


def _check_reference(expected: ServerKind | None, node: YamlNode) -> tuple[YamlNode, str] | None:
    """Return the invalid part of a reference and the end of a sentence about it, `None` if the reference is valid."""
    form = f"{{type: {expected or 'KIND'}, name: NAME}}"
    if not node.children.keys() >= REFERENCE_FIELDS:
        return node, f" is not a reference to a server; write it as {form}"
    kind, name = node.children["type"], node.children["name"]
    if kind.value not in SERVER_KINDS:
        hint = format_suggestion(str(kind.value), SERVER_KINDS, f"there are {', '.join(SERVER_KINDS)}")
        return kind, f".type: there is no kind of server {str(kind.value)!r}{hint}"
    if expected is not None and kind.value != expected:
        return kind, f".type must be {expected}, got {kind.value}; write type: {expected}"
    return None if isinstance(name.value, str) else (name, f".name must be the name of a server; write it as {form}")
