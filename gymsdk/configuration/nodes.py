"""Nodes: a configuration as a tree of values, each with the place it was written at."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from gymsdk.configuration.places import Place, Trail

Scalar: TypeAlias = str | int | float | bool | bytes | None

DELETE = "_delete_key"
"""NeMo Gym's mark in a mapping: what is beneath it does not count."""


@dataclass(frozen=True, slots=True)
class Node:
    """A value and its place; a mapping's and a list's values are nodes themselves."""

    value: dict[str, Node] | list[Node] | Scalar
    place: Place

    @property
    def children(self) -> dict[str, Node]:
        """What a mapping holds; nothing where it is none."""
        return self.value if isinstance(self.value, dict) else {}

    @property
    def is_mapping(self) -> bool:
        """Whether it is a mapping."""
        return isinstance(self.value, dict)

    def mark_found(self) -> Node:
        """Give the same values, marked as read from a file that nobody named."""
        place = self.place.model_copy(update={"found": True})
        if isinstance(self.value, dict):
            return Node({key: each.mark_found() for key, each in self.value.items()}, place)
        return Node([each.mark_found() for each in self.value] if isinstance(self.value, list) else self.value, place)

    def get(self, *trail: str) -> Node | None:
        """Give what *trail* leads to, `None` where nothing is there."""
        found: Node | None = self
        for key in trail:
            found = found.children.get(key) if found is not None else None
        return found

    def place_of(self, trail: Trail) -> Place:
        """Give the place of *trail*, or of the nearest above it that is there."""
        place, node = self.place, self
        for key in trail:
            below = beneath(node, key)
            if below is None:
                break
            place, node = below.place, below
        return place

    def with_key(self, key: str, node: Node) -> Node:
        """Give the mapping with *node* under *key*."""
        return Node({**self.children, key: node}, self.place)

    def without(self, *keys: str) -> Node:
        """Give the mapping without *keys*."""
        return Node({key: node for key, node in self.children.items() if key not in keys}, self.place)

    def without_path(self, trail: Trail) -> Node:
        """Give the mapping without what *trail* leads to."""
        first, *rest = trail
        below = self.children.get(first)
        if not rest or below is None:
            return self.without(first)
        return self.with_key(first, below.without_path(tuple(rest)))

    def walk(self, trail: Trail = ()) -> Iterator[tuple[Trail, Node]]:
        """Yield every value beneath that is neither mapping nor list."""
        for key, node in _parts(self):
            if isinstance(node.value, (dict, list)):
                yield from node.walk((*trail, key))
            else:
                yield (*trail, key), node

    def places(self, trail: Trail = ()) -> Iterator[tuple[Trail, Place]]:
        """Yield the place of everything beneath, mappings and lists too."""
        for key, node in _parts(self):
            yield (*trail, key), node.place
            if isinstance(node.value, (dict, list)):
                yield from node.places((*trail, key))


def beneath(node: Node, key: str) -> Node | None:
    """Give what *key* names in a mapping or, as a number, in a list; `None` where there is nothing."""
    if isinstance(node.value, list):
        return node.value[int(key)] if key.isdecimal() and int(key) < len(node.value) else None
    return node.children.get(key)


def _parts(node: Node) -> Iterator[tuple[str, Node]]:
    if isinstance(node.value, list):
        yield from ((str(number), each) for number, each in enumerate(node.value))
    else:
        yield from node.children.items()


def plain(node: Node) -> Any:
    """Give the values of *node* without their places."""
    if isinstance(node.value, dict):
        return {key: plain(each) for key, each in node.value.items()}
    if isinstance(node.value, list):
        return [plain(each) for each in node.value]
    return node.value


def node_of(value: Any, place: Place) -> Node:
    """Give *value* as a node, all of it at *place*."""
    if isinstance(value, dict):
        return Node({str(key): node_of(each, place) for key, each in value.items()}, place)
    if isinstance(value, (list, tuple)):
        return Node([node_of(each, place) for each in value], place)
    return Node(value if isinstance(value, (str, int, float, bool, bytes)) or value is None else str(value), place)


def merged(under: Node, over: Node) -> Node:
    """Give *under* with *over* laid over it: mappings are joined, everything else is replaced."""
    if not (under.is_mapping and over.is_mapping):
        return over
    if _deletes(over):
        return over
    both = {**under.children}
    for key, node in over.children.items():
        both[key] = merged(both[key], node) if key in both else node
    return Node(both, under.place)


def _deletes(node: Node) -> bool:
    mark = node.children.get(DELETE)
    return mark is not None and mark.value is True


def swept(node: Node) -> Node:
    """Give *node* without the mappings that only say they are deleted, and without the marks."""
    if not node.is_mapping:
        return node
    kept = {key: swept(each) for key, each in node.children.items() if key != DELETE and not _only_deletes(each)}
    return Node(kept, node.place)


def _only_deletes(node: Node) -> bool:
    return _deletes(node) and len(node.children) == 1
