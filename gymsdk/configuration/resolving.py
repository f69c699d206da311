"""Resolving: `${...}` put in through OmegaConf, and what must be given found."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from gymsdk.configuration.nodes import Node, beneath, node_of, plain
from gymsdk.configuration.places import Place, Problems, Trail, dotted
from gymsdk.errors import suggestion
from gymsdk.settings import MARK

if TYPE_CHECKING:
    from omegaconf import DictConfig

MISSING = "???"
VARIABLE = re.compile(r"\$\{oc\.env:\s*([A-Za-z_]\w*)\s*\}")
REFERENCE = re.compile(r"\$\{\s*([A-Za-z_][\w-]*(?:\.[\w-]+)*)\s*\}")
RESOLVER = re.compile(r"\$\{\s*([A-Za-z_][\w.]*):")
REFERRING = "write ${key.of.another}, or ${oc.env:VARIABLE}"
PROBE = "gymsdk-probe"
"""What a value is replaced with to see which others depend on it."""

ROOT = re.compile(r"\$\{([A-Za-z_]\w*)[.}\[]")


def expanded(text: str) -> str:
    """Give *text* with the environment variables it refers to; as it is where they do not resolve."""
    if MARK not in text:
        return text
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        return str(OmegaConf.create({"text": text}).text)
    except OmegaConfBaseException:
        return text


def referred(root: Node) -> set[str]:
    """Give the keys at the top that something in *root* refers to."""
    texts = (node.value for _, node in root.walk() if isinstance(node.value, str))
    return {name for text in texts for name in ROOT.findall(text)}


def resolved(root: Node, problems: Problems, absent: tuple[str, ...] = ()) -> Node:
    """Give *root* with all references put in, keys that may be *absent* as null; what is wrong goes to *problems*."""
    from omegaconf import OmegaConf

    sound = _sound(root, (), problems)
    values = dict.fromkeys(absent) | plain(sound)
    config = OmegaConf.create(values)
    whole = _Resolving(config, sound, problems).node(sound, ())
    _demanded(whole, problems)
    return whole


def _sound(node: Node, trail: Trail, problems: Problems) -> Node:
    """Give *node* without texts that OmegaConf cannot even parse."""
    if isinstance(node.value, dict):
        return Node({key: _sound(each, (*trail, key), problems) for key, each in node.value.items()}, node.place)
    if isinstance(node.value, list):
        below = [_sound(each, (*trail, str(number)), problems) for number, each in enumerate(node.value)]
        return Node(below, node.place)
    if not isinstance(node.value, str) or MARK not in node.value or _parses(node.value):
        return node
    problems.add(node.place, f"{dotted(trail)} has a ${{ that does not close as it should; write ${{key.of.another}}")
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

    def node(self, node: Node, trail: Trail) -> Node:
        if isinstance(node.value, dict):
            return Node({key: self.node(each, (*trail, key)) for key, each in node.value.items()}, node.place)
        if isinstance(node.value, list):
            below = [self.node(each, (*trail, str(number))) for number, each in enumerate(node.value)]
            return Node(below, node.place)
        if isinstance(node.value, str) and MARK in node.value:
            return node_of(self._value(node.value, trail, node.place), self._place(node, trail))
        return node

    def _place(self, node: Node, trail: Trail) -> Place:
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
        match = REFERENCE.fullmatch(node.value) if isinstance(node.value, str) else None
        target: Node | None = self._root if match else None
        for key in match[1].split(".") if match else ():
            target = beneath(target, key) if target is not None else None
        return target is not None and self._is_found(target, (*seen, node))

    def _traced(self) -> dict[Trail, Place]:
        """Give, for each text of a trusted source, the place of a value of an untrusted file that it depends on.

        It replaces each such value in turn and compares what the texts resolve to, so that every form of reference
        counts, nested and relative ones too.
        """
        leaves = list(self._root.walk())
        texts = [t for t, leaf in leaves if isinstance(leaf.value, str) and MARK in leaf.value and not leaf.place.found]
        origins: dict[Trail, Place] = {}
        untrusted = [(trail, leaf) for trail, leaf in leaves if leaf.place.found]
        if not texts or not untrusted:
            return origins
        before = {trail: self._outcome(trail) for trail in texts}
        for (*above, last), leaf in untrusted:
            parent = self._found(tuple(above))
            key = int(last) if _is_list(parent) else last
            parent[key] = PROBE
            for trail in texts:
                if trail not in origins and self._outcome(trail) != before[trail]:
                    origins[trail] = leaf.place
            parent[key] = leaf.value
        return origins

    def _outcome(self, trail: Trail) -> tuple[bool, Any]:
        """Give whether *trail* resolves, and what to."""
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        try:
            found = self._found(trail)
            return True, OmegaConf.to_container(found, resolve=True) if OmegaConf.is_config(found) else found
        except (OmegaConfBaseException, RecursionError):
            return False, None

    def _value(self, text: str, trail: Trail, place: Place) -> Any:
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
            self._problems.add(place, f"{dotted(trail)} {said}")
            return None

    def _found(self, trail: Trail) -> Any:
        found: Any = self._config
        for key in trail:
            found = found[int(key)] if _is_list(found) else found[key]
        return found

    def _said(self, text: str) -> str:
        """Give which reference of *text* is wrong and what to do; a default in it may be a secret."""
        unset = [name for name in VARIABLE.findall(text) if name not in os.environ]
        if unset:
            return f"set the environment variable {unset[0]}, or write ${{oc.env:{unset[0]},DEFAULT}}"
        if unknown := next((name for name in RESOLVER.findall(text) if not _is_resolver(name)), None):
            known = ("oc.env", "inherit_from", "copy")
            return f"nobody knows {unknown}:{suggestion(unknown, known, REFERRING)}"
        for reference in REFERENCE.findall(text):
            if absent := self._absent(reference.split(".")):
                return absent
        return "give the whole way to a key from the top, and see that that one resolves"

    def _absent(self, way: list[str]) -> str:
        """Give what is not there of *way*, nothing where all of it is."""
        node = self._root
        for number, key in enumerate(way, 1):
            below = node.get(key)
            if below is None and node.is_mapping:
                return f"nothing is called {dotted(tuple(way[:number]))!r}{suggestion(key, node.children)}"
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
    open_: list[tuple[Trail, Place]] = list(_missing(root))
    if not open_:
        return
    told = ", ".join(f"{dotted(trail)} ({place})" for trail, place in open_)
    first = dotted(open_[0][0])
    problems.add(
        open_[0][1], f"values that must be given are ???: {told}; write {first}=VALUE, or put them into env.yaml"
    )


def _missing(root: Node) -> Iterator[tuple[Trail, Place]]:
    return ((trail, node.place) for trail, node in root.walk() if node.value == MISSING)
