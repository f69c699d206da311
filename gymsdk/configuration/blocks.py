"""Blocks: the servers that a configuration names, each read by its kind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gymsdk.configuration import keys, referring, unsupported
from gymsdk.configuration.checking import checked, given, is_given
from gymsdk.configuration.deployment import Agent, Block, Dataset, Player, Policy, Resources
from gymsdk.configuration.grading import with_judge
from gymsdk.configuration.kinds import (
    ENVIRONMENTS,
    IMPLEMENTATIONS,
    KINDS,
    MODELS,
    REFUSED,
    RESOURCES,
    Kind,
    named,
)
from gymsdk.configuration.nodes import Node, plain
from gymsdk.configuration.places import Place, Problems, Trail, dotted
from gymsdk.configuration.players import player
from gymsdk.errors import suggestion

MCP = "expose_tools_over_mcp"
LISTENING = ("host", "port", "advertise_host", "domain")
BUDGET = {"turns": "turns", "tool_calls": "tool_calls", "seconds": "deadline"}
TURNS = ("turns", "max_steps", "max_turns")
EPISODE = "default_episode_timeout_seconds"
DATASET = {"name": "name", "path": "jsonl_fpath", "type": "type", "repeats": "num_repeats"}


def is_block(node: Node) -> bool:
    """Whether *node* has the shape of a server: a kind, and beneath it an implementation."""
    return any(kind in node.children for kind in KINDS)


class Blocks:
    """One reading of the blocks of *root*; *ignored* gathers NeMo Gym's keys that mean nothing here, with places."""

    def __init__(self, root: Node, policy: Policy, folder: Path, problems: Problems) -> None:
        self.ignored: dict[str, Place] = {}
        self._root = root
        self._policy = policy
        self._folder = folder
        self._problems = problems

    def read(self) -> tuple[Block, ...]:
        """Give the blocks that are right."""
        found = (self._block(name, node) for name, node in self._root.children.items() if is_block(node))
        return tuple(block for block in found if block is not None)

    def _block(self, name: str, node: Node) -> Block | None:
        kind = self._kind(name, node)
        implementation = self._implementation(name, kind, node.children[kind]) if kind else None
        if kind is None or implementation is None:
            return None
        trail = (name, kind, implementation)
        body = node.children[kind].children[implementation]
        if body.value is None:
            body = Node({}, body.place)
        if not body.is_mapping:
            self._problems.add(body.place, f"{dotted(trail)} must hold `key: value` lines, as in entrypoint: app.py")
            return None
        return self._read(trail, kind, body)

    def _read(self, trail: Trail, kind: Kind, body: Node) -> Block | None:
        refers = referring.refers(trail, body, self._problems)
        for key in keys.ignored(trail[2]) & body.children.keys() - refers.keys():
            if body.children[key].value is not None:
                self.ignored.setdefault(key, body.children[key].place)
        rest = body.without(*keys.BLOCK, *refers, *referring.slots(kind), *keys.ignored(trail[2]))
        refused = unsupported.SETTINGS.get(trail[2], {})
        rest = unsupported.without_unsupported(rest, trail, refused, self._problems)
        models: dict[str, str] = {}
        if kind == RESOURCES:
            models = {key: name for key, name in refers.items() if plain(body.children[key])["type"] == MODELS}
            rest, models = with_judge(named(trail[2]), trail, rest, models, self._problems)
        else:
            self._check_keys(trail, rest, {*refused})
        part = self._part(kind, trail, rest)
        values = given(body, {key: key for key in LISTENING})
        datasets = tuple(self._datasets(trail, body))
        whole = {
            "name": trail[0],
            "kind": kind,
            "implementation": trail[2],
            # Where the part is wrong, that has been told: the rest of the block is looked at all the same.
            "part": part or Agent(),
            "settings": plain(rest.without(MCP)) if kind == RESOURCES else plain(rest),
            "refers": refers,
            "models": models,
            "datasets": datasets,
            "place": body.place,
            "places": dict(rest.places()),
        }
        return checked(Block, whole | values, keys={}, root=self._root, trail=trail, problems=self._problems)

    def _kind(self, name: str, node: Node) -> Kind | None:
        kinds = [kind for kind in KINDS if kind in node.children]
        if len(kinds) > 1:
            first, second = (f"{kind} at {node.children[kind].place}" for kind in kinds[:2])
            self._problems.add(node.place, f"{name} is both {first} and {second}; call one of them something else")
            return None
        for key in node.children:
            if key not in kinds:
                near = suggestion(key, KINDS, f"move it beneath {kinds[0]} and its implementation")
                self._problems.add(node.children[key].place, f"{name}.{key} is no kind of server{near}")
        return kinds[0]

    def _implementation(self, name: str, kind: Kind, node: Node) -> str | None:
        below = list(node.children)
        if len(below) != 1:
            told = " and ".join(f"{each} ({node.children[each].place})" for each in below) or "none"
            choice = " or ".join(IMPLEMENTATIONS.get(kind, ("an environment's name",)))
            advice = "keep one" if below else f"write {choice} beneath it"
            self._problems.add(node.place, f"{name}.{kind} needs one implementation, and has {told}; {advice}")
            return None
        implementation, known = below[0], IMPLEMENTATIONS.get(kind)
        place = node.children[implementation].place
        if kind == MODELS and implementation in REFUSED:
            self._problems.add(place, f"{name}: {implementation} has no counterpart here; {REFUSED[implementation]}")
            return None
        if known is not None and implementation not in known:
            near = suggestion(implementation, known, f"there are {', '.join(known)}")
            self._problems.add(place, f"{name}: {kind} has no implementation {implementation!r} here{near}")
            return None
        return implementation

    def _check_keys(self, trail: Trail, rest: Node, refused: set[str]) -> None:
        """Report unknown keys of *rest*: an error for a slip and for a server of gymsdk's own, else a warning."""
        used = keys.used(trail[2]) | {*referring.slots(trail[1])}
        for key, node in rest.children.items():
            if key in used:
                continue
            if trail[2] == "gymsdk_model" or keys.is_slip(key, used | refused):
                near = suggestion(key, used | refused, f"it may hold {', '.join(sorted(used))}")
                self._problems.add(node.place, f"{dotted(trail)} has no setting {key!r}{near}")
            else:
                self._problems.warn(node.place, f"{dotted((*trail, key))} is not known to gymsdk and is ignored")

    def _part(self, kind: Kind, trail: Trail, rest: Node) -> Resources | Player | Agent | None:
        if kind == MODELS:
            return player(trail[2], rest, self._policy, trail, self._problems)
        if kind == RESOURCES:
            mcp = rest.get(MCP)
            values: dict[str, Any] = {"environment": named(trail[2])} | ({"mcp": mcp.value} if mcp else {})
            return checked(Resources, values, keys={"mcp": MCP}, root=self._root, trail=trail, problems=self._problems)
        turns = next((key for key in TURNS if is_given(rest.get(key))), TURNS[0])
        called = BUDGET | {"turns": turns} | ({"seconds": EPISODE} if kind == ENVIRONMENTS else {})
        values = given(rest, called)
        return checked(Agent, values, keys=called, root=self._root, trail=trail, problems=self._problems)

    def _datasets(self, trail: Trail, body: Node) -> Iterator[Dataset]:
        node = body.get("datasets")
        if node is None or node.value is None:
            return
        if not isinstance(node.value, list):
            self._problems.add(node.place, f"{dotted(trail)}.datasets must be a list of name and jsonl_fpath")
            return
        for number, each in enumerate(node.value):
            values = given(each, DATASET)
            if isinstance(path := values.get("path"), str):
                values["path"] = self._folder / path
            where = (*trail, "datasets", str(number))
            values["place"] = each.place
            found = checked(Dataset, values, keys=DATASET, root=self._root, trail=where, problems=self._problems)
            if found is not None:
                yield found
