"""Showing: the resolved settings, each with where it comes from, and no secret."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from gymsdk.addresses import public
from gymsdk.configuration.deployment import Block, Deployment, Player, Setting
from gymsdk.configuration.kinds import MODELS
from gymsdk.configuration.nodes import Node, plain
from gymsdk.configuration.places import DEFAULT, Place, Trail, dotted, hidden
from gymsdk.configuration.players import endpoint
from gymsdk.configuration.veiling import is_secret, is_veiled

HIDDEN = "***"
WIDEST = 48
"""The column where the place of a setting stands, if its value leaves room."""


def settings(root: Node, deployment: Deployment, secrets: set[str], veils: set[Trail]) -> tuple[Setting, ...]:
    """Give everything in *root*, and what is not there but counts, as it may be shown: nothing of *veils* is."""
    # What another setting has from there is the same.
    secrets = secrets | {str(node.value) for trail, node in root.walk() if node.value and is_veiled(trail, veils)}
    written = {trail: (value, place) for trail, value, place in _leaves(root, ())}
    for block in deployment.get_servers(MODELS):
        written |= dict(_endpoint(root, block))
    ours = {trail: (value, DEFAULT) for trail, value in _defaults(deployment) if root.get(*trail) is None}
    found = sorted((written | ours).items(), key=lambda each: _order(each[0], deployment))
    return tuple(
        Setting(
            trail=trail, value=HIDDEN if is_veiled(trail, veils) else _shown(trail, value, secrets, veils), place=at
        )
        for trail, (value, at) in found
    )


def without(deployment: Deployment, fields: Mapping[str, Collection[str]]) -> Deployment:
    """Give *deployment* with these *fields* of servers hidden too, by the servers' names."""
    told = [
        each.model_copy(update={"value": HIDDEN}) if {*each.trail[1:]} & {*fields.get(each.trail[0], ())} else each
        for each in deployment.settings
    ]
    return deployment.model_copy(update={"settings": tuple(told)})


def lines(deployment: Deployment) -> Iterator[str]:
    """Yield the settings as YAML, each with its place in a comment."""
    above: Trail = ()
    for each in deployment.settings:
        shared = _shared(above, each.trail)
        for depth in range(shared, len(each.trail) - 1):
            yield f"{'  ' * depth}{each.trail[depth]}:"
        line = f"{'  ' * (len(each.trail) - 1)}{each.trail[-1]}: {_written(each.value)}"
        yield f"{line:<{WIDEST}}  # {each.place}"
        above = each.trail


def told(deployment: Deployment) -> dict[str, Any]:
    """Give the settings, and what is ignored, as JSON."""
    found = {dotted(each.trail): {"value": each.value, "from": str(each.place)} for each in deployment.settings}
    return {"settings": found, "ignored": list(deployment.ignored), "notes": list(deployment.notes)}


def _leaves(node: Node, trail: Trail) -> Iterator[tuple[Trail, Any, Place]]:
    for key, each in node.children.items():
        way = (*trail, key)
        if each.is_mapping and each.children:
            yield from _leaves(each, way)
        elif each.value is not None:
            yield way, plain(each), each.place


def _defaults(deployment: Deployment) -> Iterator[tuple[Trail, Any]]:
    yield ("head_server", "host"), deployment.head.host
    yield ("head_server", "port"), deployment.head.port
    yield ("default_host",), deployment.default_host
    yield ("insecure",), deployment.insecure
    yield ("log_level",), deployment.logs.level
    yield ("log_format",), deployment.logs.format
    yield ("model_endpoint_readiness_timeout_seconds",), deployment.readiness
    for block in deployment.servers:
        trail = (block.name, block.kind, block.implementation)
        yield (*trail, "host"), block.host or deployment.default_host
        yield (*trail, "port"), 0
        for key, name in block.refers.items():
            yield (*trail, key, "name"), name


def _endpoint(root: Node, block: Block) -> Iterator[tuple[Trail, tuple[Any, Place]]]:
    """Yield the addresses and the model a model server really has, its own or the policy's."""
    if not isinstance(block.part, Player) or block.implementation == "gymsdk_model":
        return
    trail = (block.name, block.kind, block.implementation)
    its_url, its_key, its_model = endpoint(block.implementation)
    urls = list(block.part.options.get("base_url", ()))
    name = block.part.name.partition("/")[2]
    told = [
        (its_url, "policy_base_url", urls if len(urls) > 1 else "".join(urls)),
        (its_model, "policy_model_name", name),
    ]
    if block.part.options.get("api_key"):
        told.append((its_key, "policy_api_key", HIDDEN))
    for key, setting, value in told:
        own = root.get(*trail, key)
        if value:
            yield (*trail, key), (value, own.place if own and own.value else root.place_of((setting,)))


def _order(trail: Trail, deployment: Deployment) -> tuple[int, Trail]:
    """Give the head first, then single settings, then the servers in their order."""
    names = [block.name for block in deployment.servers]
    if trail[0] in names:
        return 2 + names.index(trail[0]), trail[1:3]
    return (0 if trail[0] == "head_server" else 1), trail[:1]


def _shown(trail: Trail, value: Any, secrets: set[str], veils: set[Trail]) -> Any:
    if (is_secret(trail) or is_veiled(trail, veils)) and value not in ("", None) and not isinstance(value, bool):
        return HIDDEN
    if isinstance(value, dict):
        return {key: _shown((*trail, key), each, secrets, veils) for key, each in value.items()}
    if isinstance(value, list):
        return [_shown((*trail, str(at)), each, secrets, veils) for at, each in enumerate(value)]
    return public(hidden(value, secrets)) if isinstance(value, str) else value


def _shared(one: Trail, other: Trail) -> int:
    """Give how many keys both begin with, their last ones left out."""
    shared = 0
    for first, second in zip(one[:-1], other[:-1], strict=False):
        if first != second:
            break
        shared += 1
    return shared


def _written(value: Any) -> str:
    """Give *value* as YAML in one line."""
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z_/][\w./-]*", value):
        return (
            value
            if value.lower() not in {"yes", "no", "on", "off", "true", "false", "null", "y", "n"}
            else f'"{value}"'
        )
    return json.dumps(value, ensure_ascii=False, default=str)
