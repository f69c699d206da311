"""A choice: which of several servers of one name the configuration tells of, and what it says beside them."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Any

from gymsdk.servers.nodes.service import Service
from gymsdk.servers.watching.health import Status
from gymsdk.transcript import Item

ROUTES = "environment_server_routes"
"""The key under which the configuration says whom a task of which environment is sent to."""


def first(
    services: Iterable[Service], health: Mapping[str, Status | None], *, draining: Container[str] = ()
) -> dict[str, Service]:
    """Give one of *services* for each name: the oldest of those that answer, one of *draining* only if need be."""
    best: dict[str, Service] = {}

    def order(one: Service) -> tuple[bool, bool, float, str]:
        return health.get(one.id) not in {"success", None}, one.id in draining, one.started, one.id

    for each in sorted(services, key=order):
        best.setdefault(each.name, each)
    return best


def told(services: Iterable[Service]) -> Item:
    """Give what the configuration says of *services* beside their blocks: where tasks are sent, what the model is."""
    said: dict[str, Any] = {}
    for each in services:
        its = each.fields.get("resources_server")
        if each.kind == "environment_servers" and isinstance(its, dict) and isinstance(its.get("name"), str):
            said.setdefault(ROUTES, {})[its["name"]] = each.name
        if each.kind == "responses_api_models" and isinstance(each.fields.get("model"), str):
            said.setdefault("policy_model_name", each.fields["model"])
    return said
