"""Consistency: whether the servers of a configuration fit together, their names, references and ports."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from gymsdk.addresses import ANYWHERE
from gymsdk.configuration.deployment import Block, Deployment, Head
from gymsdk.configuration.kinds import AGENTS, ENVIRONMENTS, MODELS, POLICY, RESOURCES, Kind
from gymsdk.configuration.nodes import Node
from gymsdk.configuration.places import Place, Problems
from gymsdk.configuration.referring import references
from gymsdk.errors import suggestion

WANTED: dict[Kind, tuple[tuple[str, Kind], ...]] = {
    AGENTS: (("resources_server", RESOURCES), ("model_server", MODELS)),
    ENVIRONMENTS: (("agent_server", AGENTS), ("resources_server", RESOURCES)),
}
"""What a server of a kind refers to."""


def check_references(written: Node, root: Node, blocks: Collection[Block], problems: Problems) -> None:
    """Tell of references to servers that are not there, or are of another kind.

    Of what is *written* but not in *root* it has been told already that it is wrong.
    """
    # By the shape of the file, not by what was read: a block that is wrong itself is there.
    kinds = {name: set(node.children) for name, node in root.children.items()}
    for block in blocks:
        for key, kind, name, node in references(root, block):
            wrong = name not in kinds and name in written.children
            if wrong or kind in kinds.get(name, ()):
                continue
            there = [each for each, its in kinds.items() if kind in its]
            near = suggestion(name, there, _what_to_add(name, kind, there))
            problems.add(node.place, f"{block.name}.{key} refers to {name!r}, which is none of the {kind}{near}")


def _what_to_add(name: str, kind: str, there: Collection[str]) -> str:
    if (name, kind) == (POLICY, MODELS):
        # NeMo Gym's files of environments leave it to another file.
        return f"add a file that has {POLICY} (--config FILE), or say who plays: --model scripted/oracle"
    return f"name one of {', '.join(there)}" if there else f"add a block {name}"


def completed(blocks: Iterable[Block]) -> tuple[Block, ...]:
    """Give *blocks* with the references they leave out, where only one server can be meant."""
    known = tuple(blocks)
    return tuple(block.model_copy(update={"refers": {**dict(_meant(block, known)), **block.refers}}) for block in known)


def judging(blocks: Iterable[Block]) -> set[str]:
    """Give the names of the model servers that environments ask, for a judge or a user: none of them is the policy."""
    return {name for block in blocks for name in block.models.values()}


def _meant(block: Block, blocks: Collection[Block]) -> Iterator[tuple[str, str]]:
    for key, kind in WANTED.get(block.kind, ()):
        names = [each.name for each in blocks if each.kind == kind and each.name not in judging(blocks) - {POLICY}]
        if kind == MODELS and POLICY in names:
            names = [POLICY]
        if key not in block.refers and len(names) == 1:
            yield key, names[0]


def check_ports(root: Node, deployment: Deployment, problems: Problems) -> None:
    """Tell of ports that two would have, or nobody may have."""
    taken: dict[int, list[tuple[str, str]]] = {}
    for name, host, port, place in _listening(root, deployment.head, deployment):
        if port in deployment.ports.disallowed:
            problems.add(place, f"{name} has port {port}, which disallowed_ports forbids; choose another")
        for other, its in taken.setdefault(port, []):
            if host == its or {host, its} & ANYWHERE:
                problems.add(place, f"{name} and {other} both have port {port} of {host}; give one of them another")
        taken[port].append((name, host))


def _listening(root: Node, head: Head, deployment: Deployment) -> Iterator[tuple[str, str, int, Place]]:
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
            near = suggestion(name, installed, "`gymsdk list` names those that are; environments are packages")
            problems.add(block.place, f"{block.name}: no environment named {name!r} is installed{near}")
    problems.raise_if_any()
