"""Fitting: whether the environments and models that a configuration names are there, and take what it gives them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from gymsdk.errors import BadConfig, UnknownModel, UsageError

if TYPE_CHECKING:
    from gymsdk.config.model import Deployment, ModelServerConfig, ServerConfig
    from gymsdk.types import Model

Wrong: TypeAlias = tuple[tuple[str, ...], str]
"""The keys that lead to a setting of a server, and a sentence about it."""


def check(deployment: Deployment, blocks: Collection[ServerConfig] | None = None) -> None:
    """Raise `BadConfig` with a line for all that does not fit of *blocks*, by default every server there is.

    Raises `BrokenEnvironment` where an installed environment cannot be loaded.
    """
    from gymsdk import config
    from gymsdk.config.model import ModelServerConfig as Named
    from gymsdk.config.yaml import Problems, format_key_path
    from gymsdk.plugins.registry import installed

    chosen = deployment.servers if blocks is None else tuple(blocks)
    problems, known = Problems(), installed()
    players = {each.name: each.part for each in deployment.servers if isinstance(each.part, Named)}
    try:
        config.check_environments(deployment.model_copy(update={"servers": chosen}), known)
    except BadConfig as error:
        problems.add_error(error)
    for block in chosen:
        problems.secrets |= _secrets(block)
        for way, sentence in _wrong(block, known, players):
            whole = format_key_path((block.name, block.kind, block.implementation, *way))
            problems.add(block.place_of(way), f"{whole}: {sentence}")
    problems.raise_if_any()


def check_names(names: Iterable[str]) -> None:
    """Refuse a file where an environment would be named; raises `UsageError`."""
    if file := next((name for name in names if re.fullmatch(r".*\.ya?ml", name)), None):
        raise UsageError(f"{file!r} is a file; give it with --config {file}")


def _wrong(block: ServerConfig, known: Collection[str], players: Mapping[str, ModelServerConfig]) -> Iterable[Wrong]:
    from gymsdk.config.model import ModelServerConfig as Named
    from gymsdk.config.model import ResourcesServerConfig

    if isinstance(block.part, ResourcesServerConfig):
        there = block.part.environment in known
        return _of_environment(block.part.environment, {**block.settings, **_judges(block, players)}) if there else ()
    return _of_model(block.part) if isinstance(block.part, Named) else ()


def _of_environment(name: str, settings: Mapping[str, Any]) -> Iterator[Wrong]:
    from gymsdk.plugins import registry

    try:
        registry.load(name, **settings)
    except UsageError as error:
        yield from error.setting_errors or [((), str(error))]


def _judges(block: ServerConfig, players: Mapping[str, ModelServerConfig]) -> dict[str, Model]:
    """Return the model for each setting of *block* that names a model server."""
    from gymsdk.models.registry import ReferencedModel, model

    def built(name: str) -> Model:
        return model(players[name].name, **players[name].options)

    return {key: ReferencedModel(name, partial(built, name)) for key, name in block.models.items()}


def _of_model(player: ModelServerConfig) -> Iterator[Wrong]:
    from gymsdk.models.registry import REQUEST_OPTION_HINTS, model

    try:
        model(player.name, **player.options)
    except UnknownModel as error:
        yield ("model",), str(error)
    except UsageError as error:
        played_here = player.name.startswith("scripted/")
        sent = next((key for key in REQUEST_OPTION_HINTS if player.options.get(key)), "model")
        yield (sent,) if played_here else (), str(error)


def _secrets(block: ServerConfig) -> set[str]:
    """Give the texts among the settings of *block* that nobody may read."""
    from gymsdk.config.redaction import find_secrets
    from gymsdk.config.yaml import Node, build_node

    told = build_node(dict(block.settings), block.place)
    for key in (block.implementation, block.kind, block.name):
        told = Node({key: told}, block.place)
    return find_secrets(told)
