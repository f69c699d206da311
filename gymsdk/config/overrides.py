"""Apply overrides from the command line, in our form and Hydra's, and the policy's endpoint from the environment."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum

from gymsdk.config import fields, yaml
from gymsdk.config.model import SERVER_KINDS, find_kind
from gymsdk.config.resolve import apply_inheritance
from gymsdk.config.yaml import (
    COMMAND_LINE,
    HANDED_OVER,
    KeyPath,
    Place,
    Problems,
    YamlNode,
    format_key_path,
    merge_nodes,
)
from gymsdk.errors import BadConfig, format_name, format_suggestion
from gymsdk.models.options import ENVIRONMENT_VARIABLES

API_KEY_SETTING = "policy_api_key"
BASE_URL_SETTING = "policy_base_url"

SWITCH_VARIABLES = {"token_file": "GYMSDK_TOKEN_FILE", "insecure": "GYMSDK_INSECURE"}
"""Further settings with an environment variable."""


@dataclass(frozen=True, slots=True)
class Override:
    """A setting on the command line: its path and its value; `None` deletes the setting."""

    path: KeyPath
    value: YamlNode | None


def parse_overrides(words: Iterable[str], problems: Problems) -> list[Override]:
    """Parse *words* as overrides, such as `head_server.port=8000` or `~datasets`; errors go to *problems*."""
    parsed = (_parse_override(word, problems) for word in words)
    return [override for override in parsed if override is not None]


def _parse_override(word: str, problems: Problems) -> Override | None:
    match = re.fullmatch(r"(?P<sign>\+{0,2}|~)(?P<key>[^=\s+~]+?)(?:=(?P<value>.*))?", word.strip(), re.DOTALL)
    if match is None or (match["value"] is None and match["sign"] != "~"):
        name = word.partition("=")[0]
        problems.add(
            COMMAND_LINE, f"{format_name(name)!r} is not a setting; write it as key=value, as in head_server.port=8000"
        )
        return None
    path = tuple(match["key"].split("."))
    if not all(path):
        problems.add(
            COMMAND_LINE, f"{format_name(match['key'])!r} has an empty part; write it as in head_server.port=8000"
        )
        return None
    if match["sign"] == "~":
        return Override(path, None)
    try:
        return Override(path, _parse_value(match["value"]))
    except BadConfig:
        problems.add(
            COMMAND_LINE,
            f"the value of {format_name(match['key'])} is not valid YAML; check its brackets, or put it in quotes",
        )
        return None


def _parse_value(text: str) -> YamlNode:
    """Parse *text* as YAML; an empty text stays an empty string."""
    if not text.strip():
        return YamlNode("", COMMAND_LINE)
    node = yaml.parse_yaml(text, COMMAND_LINE.source)
    # YAML reads `{port:1}` as the key `port:1` without a value.
    if any(":" in key and child.value is None for key, child in node.children.items()):
        raise BadConfig("a colon in a mapping must be followed by a space")
    return node.map(lambda _, child: replace(child, place=COMMAND_LINE))


def apply_overrides(root: YamlNode, overrides: Iterable[Override], problems: Problems) -> YamlNode:
    """Return *root* with *overrides* applied in order; errors go to *problems*."""
    for override in overrides:
        path = _complete_path(root, override.path)
        if (value := override.value) is None:
            root = _delete(root, path, problems)
            continue
        for key in reversed(path):
            value = YamlNode({key: value}, COMMAND_LINE)
        root = merge_nodes(root, fields.normalize_keys(value))
    return root


def _complete_path(root: YamlNode, path: KeyPath) -> KeyPath:
    """Return *path* with the kind and the implementation of a server inserted where it leaves them out."""
    if len(path) < 2 or path[1] in SERVER_KINDS:  # noqa: PLR2004 - a server's name and its implementation
        return path
    server, implementation = root.get(path[0]), path[1]
    kind = next((kind for kind in SERVER_KINDS if server and server.get(kind, implementation) is not None), None)
    if kind is None and not (server and server.get(implementation)):
        kind = find_kind(implementation)
    if kind is not None:
        return (path[0], kind, *path[1:])
    return (path[0], *_find_server_body(root, path[0], implementation), *path[1:])


def _find_server_body(root: YamlNode, name: str, key: str) -> KeyPath:
    """Return the kind and the implementation of the server *name*, empty if it has not one of each.

    A *key* that resembles a kind of server is a misspelled kind, and no setting.
    """
    if fields.is_misspelling(key, SERVER_KINDS):
        return ()
    # A server may inherit both from another.
    server = root.get(name)
    if server is not None and not any(kind in server.children for kind in SERVER_KINDS):
        server = apply_inheritance(root, Problems()).get(name)
    kinds = [kind for kind in SERVER_KINDS if server is not None and kind in server.children]
    if server is None or len(kinds) != 1:
        return ()
    implementations = [*server.children[kinds[0]].children]
    return (kinds[0], *implementations) if len(implementations) == 1 else ()


def _delete(root: YamlNode, path: KeyPath, problems: Problems) -> YamlNode:
    parent = root.get(*path[:-1])
    if parent is None or path[-1] not in parent.children:
        hint = format_suggestion(path[-1], parent.children if parent else root.children)
        problems.add(COMMAND_LINE, f"there is no {format_name(format_key_path(path))} to delete{hint}")
        return root
    return root.without_path(path)


class SettingSource(Enum):
    """Where a setting comes from."""

    GIVEN = 1
    """The command line, or a program."""

    VARIABLE = 2
    """An environment variable."""

    FILE = 3
    """A file that the user named."""

    FOUND = 4
    """A file that gymsdk found in the working folder."""


def get_source(place: Place) -> SettingSource:
    """Return the source of the setting at *place*."""
    if place in {COMMAND_LINE, HANDED_OVER}:
        return SettingSource.GIVEN
    if place.untrusted:
        return SettingSource.FOUND
    variables = {*ENVIRONMENT_VARIABLES.values(), *SWITCH_VARIABLES.values()}
    is_variable = place.line is None and place.source in variables
    return SettingSource.VARIABLE if is_variable else SettingSource.FILE


def apply_environment(root: YamlNode) -> tuple[YamlNode, tuple[str, ...]]:
    """Return *root* with the settings of environment variables, and warnings about an API key that is not used.

    A file's base URL never receives the key of an environment variable, nor the other way round: the author of the
    file would learn the user's key, or another server that of the file. For the same reason, a base URL in an
    `env.yaml` that was found in the working folder receives only that file's key, not even one of the command line.
    """
    file_key = root.get(API_KEY_SETTING)
    for key, variable in {**ENVIRONMENT_VARIABLES, **SWITCH_VARIABLES}.items():
        value, present = os.environ.get(variable), root.get(key)
        if value and (present is None or get_source(present.place) is not SettingSource.GIVEN):
            root = root.with_key(key, YamlNode(value, Place(source=variable)))
    keys = [node for node in (root.get(API_KEY_SETTING), file_key) if node is not None and node.value]
    if not keys:
        return root, ()
    base_url = root.get(BASE_URL_SETTING)
    url_source = get_source(base_url.place) if base_url is not None and base_url.value else None
    usable = [node for node in keys if url_source is None or _may_receive(get_source(node.place), url_source)]
    if usable:
        return root.with_key(API_KEY_SETTING, usable[0]), ()
    where = base_url.place if base_url is not None else ""
    note = f"the key of {keys[0].place} is not used for the base URL of {where}; give both in the same place"
    return root.without(API_KEY_SETTING), (note,)


def _may_receive(key: SettingSource, base_url: SettingSource) -> bool:
    """Whether a base URL of one source may receive a key of another."""
    if key is SettingSource.GIVEN:
        return base_url is not SettingSource.FOUND
    if base_url is SettingSource.FILE:
        return key in {SettingSource.FILE, SettingSource.FOUND}
    return key is (SettingSource.FOUND if base_url is SettingSource.FOUND else SettingSource.VARIABLE)
