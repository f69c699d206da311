"""Inheriting: NeMo Gym's words for taking over what stands elsewhere: `_inherit_from`, `_copy`, `${inherit_from:…}`."""

from __future__ import annotations

import re

from gymsdk.configuration.nodes import Node, merged
from gymsdk.configuration.places import Problems, Trail, dotted
from gymsdk.errors import suggestion

KEYS = ("_inherit_from", "_copy")
TEXT = re.compile(r"\$\{(inherit_from|copy):\s*([^}\s]+)\s*\}")


def inherited(root: Node, problems: Problems) -> Node:
    """Give *root* with what is inherited put in; what was inherited, and not copied, is no longer where it was."""
    reading = _Inheriting(root, problems)
    whole = reading.node(root, ())
    for trail in sorted(reading.moved, key=len, reverse=True):
        whole = whole.without_path(trail)
    return whole


class _Inheriting:
    """One reading of *root*, which remembers whence things were *moved*."""

    def __init__(self, root: Node, problems: Problems) -> None:
        self.moved: set[Trail] = set()
        self._root = root
        self._problems = problems
        self._open: list[Trail] = []

    def node(self, node: Node, trail: Trail) -> Node:
        if isinstance(node.value, list):
            return Node([self.node(each, (*trail, str(at))) for at, each in enumerate(node.value)], node.place)
        if isinstance(node.value, str) and (found := TEXT.fullmatch(node.value)):
            return self._taken(node, trail, found[2], moves=found[1] == "inherit_from") or Node(None, node.place)
        if not node.is_mapping:
            return node
        own = Node(
            {key: self.node(each, (*trail, key)) for key, each in node.children.items() if key not in KEYS}, node.place
        )
        for key in KEYS:
            source = node.get(key)
            if source is not None and (base := self._taken(source, trail, source.value, moves=key == KEYS[0])):
                own = merged(Node(base.value, node.place), own)
        return own

    def _taken(self, word: Node, trail: Trail, source: object, *, moves: bool) -> Node | None:
        way = tuple(str(source).split("."))
        found = self._root.get(*way)
        if found is None:
            near = suggestion(str(source), self._root.children, "write the whole way to a key from the top")
            self._problems.add(word.place, f"{dotted(trail)} inherits from {source}, which is not there{near}")
            return None
        if way in self._open or trail[: len(way)] == way:
            self._problems.add(word.place, f"{dotted(trail)} inherits from {source}, and so from itself; name another")
            return None
        if moves:
            self.moved.add(way)
        self._open.append(way)
        try:
            return self.node(found, way)
        finally:
            self._open.pop()
