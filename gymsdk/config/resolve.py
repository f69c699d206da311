"""References: the servers that a block names by `{type: KIND, name: NAME}`, and what is wrong with how it does."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from gymsdk.config.model import AGENTS, ENVIRONMENTS, MODELS, RESOURCES, SERVER_KINDS, ServerConfig, ServerKind
from gymsdk.config.yaml import (
    KeyPath,
    Node,
    Place,
    Problems,
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

MISSING_VALUE = "???"
VARIABLE_PATTERN = re.compile(r"\$\{oc\.env:\s*([A-Za-z_]\w*)\s*\}")
REFERENCE_PATTERN = re.compile(r"\$\{\s*([A-Za-z_][\w-]*(?:\.[\w-]+)*)\s*\}")
RESOLVER_PATTERN = re.compile(r"\$\{\s*([A-Za-z_][\w.]*):")
REFERENCE_ADVICE = "write ${key.of.another}, or ${oc.env:VARIABLE}"
PROBE_VALUE = "gymsdk-probe"
"""What a value is replaced with to see which others depend on it."""

ROOT_KEY_PATTERN = re.compile(r"\$\{([A-Za-z_]\w*)[.}\[]")


def expand_variables(text: str) -> str:
    """Give *text* with the environment variables it refers to; as it is where they do not resolve."""
    if INTERPOLATION_MARK not in text:
        return text
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        return str(OmegaConf.create({"text": text}).text)
    except OmegaConfBaseException:
        return text


def find_referenced_keys(root: Node) -> set[str]:
    """Give the keys at the top that something in *root* refers to."""
    texts = (node.value for _, node in root.walk() if isinstance(node.value, str))
    return {name for text in texts for name in ROOT_KEY_PATTERN.findall(text)}


def resolve_references(root: Node, problems: Problems, absent: tuple[str, ...] = ()) -> Node:
    """Give *root* with all references put in, keys that may be *absent* as null; what is wrong goes to *problems*."""
    from omegaconf import OmegaConf

    sound = _sound(root, (), problems)
    values = dict.fromkeys(absent) | to_plain(sound)
    config = OmegaConf.create(values)
    whole = _Resolving(config, sound, problems).node(sound, ())
    _demanded(whole, problems)
    return whole


def _sound(node: Node, trail: KeyPath, problems: Problems) -> Node:
    """Give *node* without texts that OmegaConf cannot even parse."""
    if isinstance(node.value, dict):
        return Node({key: _sound(each, (*trail, key), problems) for key, each in node.value.items()}, node.place)
    if isinstance(node.value, list):
        below = [_sound(each, (*trail, str(number)), problems) for number, each in enumerate(node.value)]
        return Node(below, node.place)
    if not isinstance(node.value, str) or INTERPOLATION_MARK not in node.value or _parses(node.value):
        return node
    problems.add(
        node.place, f"{format_key_path(trail)} has a ${{ that does not close as it should; write ${{key.of.another}}"
    )
    return Node(None, node.place)


def _parses(text: str) -> bool:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        OmegaConf.create({"text": text})
    except OmegaConfBaseException:
        return False
    return True


class _Resolving:
    """One resolution: *config* as OmegaConf has it, the nodes it was made of, and what is wrong."""

    def __init__(self, config: DictConfig, root: Node, problems: Problems) -> None:
        self._config = config
        self._root = root
        self._problems = problems
        self._origins = self._traced()

    def node(self, node: Node, trail: KeyPath) -> Node:
        if isinstance(node.value, dict):
            return Node({key: self.node(each, (*trail, key)) for key, each in node.value.items()}, node.place)
        if isinstance(node.value, list):
            below = [self.node(each, (*trail, str(number))) for number, each in enumerate(node.value)]
            return Node(below, node.place)
        if isinstance(node.value, str) and INTERPOLATION_MARK in node.value:
            return build_node(self._value(node.value, trail, node.place), self._place(node, trail))
        return node

    def _place(self, node: Node, trail: KeyPath) -> Place:
        """Give the place of a resolved value; it counts as found if all of it comes from an untrusted file."""
        origin = self._origins.get(trail)
        if origin is None:
            return node.place
        return node.place.model_copy(update={"origin": origin, "found": self._is_found(node, ())})

    def _is_found(self, node: Node, seen: tuple[Node, ...]) -> bool:
        """Whether *node* comes from an untrusted file, or only refers to what does; a text with more in it does not."""
        if node.place.found or any(node is each for each in seen):
            return node.place.found
        if isinstance(node.value, (dict, list)):
            leaves = [leaf for _, leaf in node.walk()]
            return bool(leaves) and all(self._is_found(leaf, (*seen, node)) for leaf in leaves)
        match = REFERENCE_PATTERN.fullmatch(node.value) if isinstance(node.value, str) else None
        target: Node | None = self._root if match else None
        for key in match[1].split(".") if match else ():
            target = get_child(target, key) if target is not None else None
        return target is not None and self._is_found(target, (*seen, node))

    def _traced(self) -> dict[KeyPath, Place]:
        """Give, for each text of a trusted source, the place of a value of an untrusted file that it depends on.

        It replaces each such value in turn and compares what the texts resolve to, so that every form of reference
        counts, nested and relative ones too.
        """
        leaves = list(self._root.walk())
        texts = [
            t
            for t, leaf in leaves
            if isinstance(leaf.value, str) and INTERPOLATION_MARK in leaf.value and not leaf.place.found
        ]
        origins: dict[KeyPath, Place] = {}
        untrusted = [(trail, leaf) for trail, leaf in leaves if leaf.place.found]
        if not texts or not untrusted:
            return origins
        before = {trail: self._outcome(trail) for trail in texts}
        for (*above, last), leaf in untrusted:
            parent = self._found(tuple(above))
            key = int(last) if _is_list(parent) else last
            parent[key] = PROBE_VALUE
            for trail in texts:
                if trail not in origins and self._outcome(trail) != before[trail]:
                    origins[trail] = leaf.place
            parent[key] = leaf.value
        return origins

    def _outcome(self, trail: KeyPath) -> tuple[bool, Any]:
        """Give whether *trail* resolves, and what to."""
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        try:
            found = self._found(trail)
            return True, OmegaConf.to_container(found, resolve=True) if OmegaConf.is_config(found) else found
        except (OmegaConfBaseException, RecursionError):
            return False, None

    def _value(self, text: str, trail: KeyPath, place: Place) -> Any:
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        try:
            found = self._found(trail)
            return OmegaConf.to_container(found, resolve=True) if OmegaConf.is_config(found) else found
        except (OmegaConfBaseException, RecursionError) as error:
            if isinstance(error, RecursionError) or "ecursive" in str(error):
                said = "refers to itself in the end; write what it is to be"
            else:
                said = f"refers to what is not there: {self._said(text)}"
            self._problems.add(place, f"{format_key_path(trail)} {said}")
            return None

    def _found(self, trail: KeyPath) -> Any:
        found: Any = self._config
        for key in trail:
            found = found[int(key)] if _is_list(found) else found[key]
        return found

    def _said(self, text: str) -> str:
        """Give which reference of *text* is wrong and what to do; a default in it may be a secret."""
        unset = [name for name in VARIABLE_PATTERN.findall(text) if name not in os.environ]
        if unset:
            return f"set the environment variable {unset[0]}, or write ${{oc.env:{unset[0]},DEFAULT}}"
        if unknown := next((name for name in RESOLVER_PATTERN.findall(text) if not _is_resolver(name)), None):
            known = ("oc.env", "inherit_from", "copy")
            return f"nobody knows {unknown}:{format_suggestion(unknown, known, REFERENCE_ADVICE)}"
        for reference in REFERENCE_PATTERN.findall(text):
            if absent := self._absent(reference.split(".")):
                return absent
        return "give the whole way to a key from the top, and see that that one resolves"

    def _absent(self, way: list[str]) -> str:
        """Give what is not there of *way*, nothing where all of it is."""
        node = self._root
        for number, key in enumerate(way, 1):
            below = node.get(key)
            if below is None and node.is_mapping:
                return (
                    f"nothing is called {format_key_path(tuple(way[:number]))!r}{format_suggestion(key, node.children)}"
                )
            if below is None:
                return ""
            node = below
        return ""


def _is_resolver(name: str) -> bool:
    from omegaconf import OmegaConf

    return OmegaConf.has_resolver(name)


def _is_list(value: object) -> bool:
    from omegaconf import ListConfig

    return isinstance(value, ListConfig)


def _demanded(root: Node, problems: Problems) -> None:
    """Tell all values that must be given in one sentence, at the place of the first."""
    open_: list[tuple[KeyPath, Place]] = list(_missing(root))
    if not open_:
        return
    told = ", ".join(f"{format_key_path(trail)} ({place})" for trail, place in open_)
    first = format_key_path(open_[0][0])
    problems.add(
        open_[0][1], f"values that must be given are ???: {told}; write {first}=VALUE, or put them into env.yaml"
    )


def _missing(root: Node) -> Iterator[tuple[KeyPath, Place]]:
    return ((trail, node.place) for trail, node in root.walk() if node.value == MISSING_VALUE)


INHERIT_KEYS = ("_inherit_from", "_copy")
INHERIT_PATTERN = re.compile(r"\$\{(inherit_from|copy):\s*([^}\s]+)\s*\}")


def apply_inheritance(root: Node, problems: Problems) -> Node:
    """Give *root* with what is inherited put in; what was inherited, and not copied, is no longer where it was."""
    reading = _Inheriting(root, problems)
    whole = reading.node(root, ())
    for trail in sorted(reading.moved, key=len, reverse=True):
        whole = whole.without_path(trail)
    return whole


class _Inheriting:
    """One reading of *root*, which remembers whence things were *moved*."""

    def __init__(self, root: Node, problems: Problems) -> None:
        self.moved: set[KeyPath] = set()
        self._root = root
        self._problems = problems
        self._open: list[KeyPath] = []

    def node(self, node: Node, trail: KeyPath) -> Node:
        if isinstance(node.value, list):
            return Node([self.node(each, (*trail, str(at))) for at, each in enumerate(node.value)], node.place)
        if isinstance(node.value, str) and (found := INHERIT_PATTERN.fullmatch(node.value)):
            return self._taken(node, trail, found[2], moves=found[1] == "inherit_from") or Node(None, node.place)
        if not node.is_mapping:
            return node
        own = Node(
            {key: self.node(each, (*trail, key)) for key, each in node.children.items() if key not in INHERIT_KEYS},
            node.place,
        )
        for key in INHERIT_KEYS:
            source = node.get(key)
            if source is not None and (base := self._taken(source, trail, source.value, moves=key == INHERIT_KEYS[0])):
                own = merge_nodes(Node(base.value, node.place), own)
        return own

    def _taken(self, word: Node, trail: KeyPath, source: object, *, moves: bool) -> Node | None:
        way = tuple(str(source).split("."))
        found = self._root.get(*way)
        if found is None:
            near = format_suggestion(str(source), self._root.children, "write the whole way to a key from the top")
            self._problems.add(word.place, f"{format_key_path(trail)} inherits from {source}, which is not there{near}")
            return None
        if way in self._open or trail[: len(way)] == way:
            self._problems.add(
                word.place, f"{format_key_path(trail)} inherits from {source}, and so from itself; name another"
            )
            return None
        if moves:
            self.moved.add(way)
        self._open.append(way)
        try:
            return self.node(found, way)
        finally:
            self._open.pop()


REFERENCE_KEYS: Mapping[str, ServerKind] = {
    "resources_server": RESOURCES,
    "model_server": MODELS,
    "agent_server": AGENTS,
}
"""The keys by which agents and environment servers refer to others, and of which kind those are."""

REFERENCE_FIELDS = {"type", "name"}


def get_reference_keys(kind: str) -> Mapping[str, ServerKind]:
    """Give the keys by which servers of *kind* refer to others; an environment's settings are its own."""
    return REFERENCE_KEYS if kind in {AGENTS, ENVIRONMENTS} else {}


def read_references(trail: KeyPath, body: Node, problems: Problems) -> dict[str, str]:
    """Give the name of each server that *body* refers to, by key; of a reference that is wrong, *problems* tell."""
    found = {}
    for key, node in body.children.items():
        if node.value is None or not _is_meant(trail[1], key, node):
            continue
        if (wrong := _wrong(get_reference_keys(trail[1]).get(key), node)) is not None:
            problems.add(wrong[0].place, f"{format_key_path((*trail, key))}{wrong[1]}")
            continue
        found[key] = str(node.children["name"].value)
    return found


def iter_references(root: Node, block: ServerConfig) -> Iterator[tuple[str, str, str, Node]]:
    """Yield key, kind, name and node of every reference of *block*."""
    body = root.get(block.name, block.kind, block.implementation)
    for key in block.refers:
        if body is not None and (node := body.get(key)) is not None:
            yield key, str(node.children["type"].value), block.refers[key], node


def _is_meant(kind: str, key: str, node: Node) -> bool:
    """Whether *node* under *key* of a server of *kind* is to be a reference, right or wrong."""
    if kind in {AGENTS, ENVIRONMENTS}:
        return key in REFERENCE_KEYS
    if kind != RESOURCES or not node.children.keys() >= REFERENCE_FIELDS:
        return False
    # An environment's settings are its own: what only looks like a reference may be something else.
    return node.children["type"].value in SERVER_KINDS or (
        node.children.keys() == REFERENCE_FIELDS and key.endswith("_server")
    )


def _wrong(wanted: ServerKind | None, node: Node) -> tuple[Node, str] | None:
    """Give what of a reference is wrong, and the rest of a sentence about it; `None` where nothing is."""
    written = f"{{type: {wanted or 'KIND'}, name: NAME}}"
    if not node.children.keys() >= REFERENCE_FIELDS:
        return node, f" is no reference to a server; write it as {written}"
    kind, name = node.children["type"], node.children["name"]
    if kind.value not in SERVER_KINDS:
        near = format_suggestion(str(kind.value), SERVER_KINDS, f"there are {', '.join(SERVER_KINDS)}")
        return kind, f".type: there is no kind of server {str(kind.value)!r}{near}"
    if wanted is not None and kind.value != wanted:
        return kind, f".type is {kind.value}, and what it refers to is one of the {wanted}; write type: {wanted}"
    return None if isinstance(name.value, str) else (name, f".name is no server's name; write it as {written}")
