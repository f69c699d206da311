"""References: the servers that a block names by `{type: KIND, name: NAME}`, and what is wrong with how it does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gymsdk.configuration.deployment import Block
from gymsdk.configuration.kinds import AGENTS, ENVIRONMENTS, KINDS, MODELS, RESOURCES, Kind
from gymsdk.configuration.nodes import Node
from gymsdk.configuration.places import Problems, Trail, dotted
from gymsdk.errors import suggestion

SLOTS: Mapping[str, Kind] = {"resources_server": RESOURCES, "model_server": MODELS, "agent_server": AGENTS}
"""The keys by which agents and environment servers refer to others, and of which kind those are."""

PARTS = {"type", "name"}


def slots(kind: str) -> Mapping[str, Kind]:
    """Give the keys by which servers of *kind* refer to others; an environment's settings are its own."""
    return SLOTS if kind in {AGENTS, ENVIRONMENTS} else {}


def refers(trail: Trail, body: Node, problems: Problems) -> dict[str, str]:
    """Give the name of each server that *body* refers to, by key; of a reference that is wrong, *problems* tell."""
    found = {}
    for key, node in body.children.items():
        if node.value is None or not _is_meant(trail[1], key, node):
            continue
        if (wrong := _wrong(slots(trail[1]).get(key), node)) is not None:
            problems.add(wrong[0].place, f"{dotted((*trail, key))}{wrong[1]}")
            continue
        found[key] = str(node.children["name"].value)
    return found


def references(root: Node, block: Block) -> Iterator[tuple[str, str, str, Node]]:
    """Yield key, kind, name and node of every reference of *block*."""
    body = root.get(block.name, block.kind, block.implementation)
    for key in block.refers:
        if body is not None and (node := body.get(key)) is not None:
            yield key, str(node.children["type"].value), block.refers[key], node


def _is_meant(kind: str, key: str, node: Node) -> bool:
    """Whether *node* under *key* of a server of *kind* is to be a reference, right or wrong."""
    if kind in {AGENTS, ENVIRONMENTS}:
        return key in SLOTS
    if kind != RESOURCES or not node.children.keys() >= PARTS:
        return False
    # An environment's settings are its own: what only looks like a reference may be something else.
    return node.children["type"].value in KINDS or (node.children.keys() == PARTS and key.endswith("_server"))


def _wrong(wanted: Kind | None, node: Node) -> tuple[Node, str] | None:
    """Give what of a reference is wrong, and the rest of a sentence about it; `None` where nothing is."""
    written = f"{{type: {wanted or 'KIND'}, name: NAME}}"
    if not node.children.keys() >= PARTS:
        return node, f" is no reference to a server; write it as {written}"
    kind, name = node.children["type"], node.children["name"]
    if kind.value not in KINDS:
        near = suggestion(str(kind.value), KINDS, f"there are {', '.join(KINDS)}")
        return kind, f".type: there is no kind of server {str(kind.value)!r}{near}"
    if wanted is not None and kind.value != wanted:
        return kind, f".type is {kind.value}, and what it refers to is one of the {wanted}; write type: {wanted}"
    return None if isinstance(name.value, str) else (name, f".name is no server's name; write it as {written}")
