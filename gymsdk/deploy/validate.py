"""Check that the environments and models of a configuration exist and accept their settings."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from gymsdk.errors import BadConfig, UnknownModel, UsageError

if TYPE_CHECKING:
    from gymsdk.config.model import Deployment, ModelServerConfig, ServerConfig
    from gymsdk.types import Model

SettingError: TypeAlias = tuple[tuple[str, ...], str]
"""The keys that lead to a setting of a server, and a message about the setting."""


def check_deployment(deployment: Deployment, blocks: Collection[ServerConfig] | None = None) -> None:
    """Check *blocks*, by default all servers of *deployment*.

    Raises:
        BadConfig: Something is wrong; the message has a line for each error.
        BrokenEnvironment: An installed environment cannot be loaded.
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
        problems.secrets |= _find_secrets(block)
        for way, sentence in _find_errors(block, known, players):
            whole = format_key_path((block.name, block.kind, block.implementation, *way))
            problems.add(block.place_of(way), f"{whole}: {sentence}")
    problems.raise_if_any()


def check_names(names: Iterable[str]) -> None:
    """Raise `UsageError` if one of *names* is a file instead of an environment."""
    if file := next((name for name in names if re.fullmatch(r".*\.ya?ml", name)), None):
        raise UsageError(f"{file!r} is a configuration file; use --config {file}")


def _find_errors(
    block: ServerConfig, known: Collection[str], players: Mapping[str, ModelServerConfig]
) -> Iterable[SettingError]:
    from gymsdk.config.model import ModelServerConfig as Named
    from gymsdk.config.model import ResourcesServerConfig

    if isinstance(block.part, ResourcesServerConfig):
        there = block.part.environment in known
        return (
            _find_environment_errors(
                block.part.environment, {**block.settings, **_build_referenced_models(block, players)}
            )
            if there
            else ()
        )
    return _find_model_errors(block.part) if isinstance(block.part, Named) else ()


def _find_environment_errors(name: str, settings: Mapping[str, Any]) -> Iterator[SettingError]:
    from gymsdk.plugins import registry

    try:
        registry.load(name, **settings)
    except UsageError as error:
        yield from error.setting_errors or [((), str(error))]


def _build_referenced_models(block: ServerConfig, players: Mapping[str, ModelServerConfig]) -> dict[str, Model]:
    """Return the model for each setting of *block* that names a model server."""
    from gymsdk.models.registry import ReferencedModel, model

    def built(name: str) -> Model:
        return model(players[name].name, **players[name].options)

    return {key: ReferencedModel(name, partial(built, name)) for key, name in block.models.items()}


def _find_model_errors(player: ModelServerConfig) -> Iterator[SettingError]:
    from gymsdk.models.registry import REQUEST_OPTION_HINTS, model

    try:
        model(player.name, **player.options)
    except UnknownModel as error:
        yield ("model",), str(error)
    except UsageError as error:
        played_here = player.name.startswith("scripted/")
        sent = next((key for key in REQUEST_OPTION_HINTS if player.options.get(key)), "model")
        yield (sent,) if played_here else (), str(error)


def _find_secrets(block: ServerConfig) -> set[str]:
    """Return the secrets among the settings of *block*."""
    from gymsdk.config.redaction import find_secrets
    from gymsdk.config.yaml import Node, build_node

    told = build_node(dict(block.settings), block.place)
    for key in (block.implementation, block.kind, block.name):
        told = Node({key: told}, block.place)
    return find_secrets(told)
