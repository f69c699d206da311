"""The policy's endpoint: base URL, key and model name, out of files, environment variables and overrides."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from gymsdk.config import yaml
from gymsdk.config.model import SERVER_KINDS, find_kind, normalize_keys
from gymsdk.config.yaml import COMMAND_LINE, HANDED_OVER, KeyPath, Node, Place, Problems, format_key_path, merge_nodes
from gymsdk.errors import BadConfig, format_suggestion
from gymsdk.models.options import ENVIRONMENT_VARIABLES

OVERRIDE_PATTERN = re.compile(r"(?P<sign>\+{0,2}|~)(?P<key>[^=\s+~]+?)(?:=(?P<value>.*))?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Override:
    """One setting of the command line: the way to it, and its value; none deletes it."""

    trail: KeyPath
    value: Node | None


def parse_overrides(words: Iterable[str], problems: Problems) -> list[Override]:
    """Give *words* as overrides; what is wrong with them goes to *problems*."""
    found = (_parsed(word, problems) for word in words)
    return [each for each in found if each is not None]


def _parsed(word: str, problems: Problems) -> Override | None:
    form = OVERRIDE_PATTERN.fullmatch(word.strip())
    if form is None or (form["value"] is None and form["sign"] != "~"):
        named = word.partition("=")[0]
        problems.add(COMMAND_LINE, f"{named!r} is no setting; write it as key=value, as in head_server.port=8000")
        return None
    trail = tuple(form["key"].split("."))
    if not all(trail):
        problems.add(COMMAND_LINE, f"{form['key']!r} has an empty part; write it as in head_server.port=8000")
        return None
    if form["sign"] == "~":
        return Override(trail, None)
    try:
        return Override(trail, _value(form["value"]))
    except BadConfig:
        problems.add(COMMAND_LINE, f"the value of {form['key']} is no YAML; mend its brackets, or put it into quotes")
        return None


def _value(text: str) -> Node:
    """Give *text* read as YAML; nothing is an empty text."""
    if not text.strip():
        return Node("", COMMAND_LINE)
    read = yaml.parse_yaml(text, COMMAND_LINE.source)
    if any(":" in key and node.value is None for key, node in read.children.items()):
        raise BadConfig("a colon in a mapping is followed by a space")
    return _placed(read)


def _placed(node: Node) -> Node:
    if isinstance(node.value, dict):
        return Node({key: _placed(each) for key, each in node.value.items()}, COMMAND_LINE)
    if isinstance(node.value, list):
        return Node([_placed(each) for each in node.value], COMMAND_LINE)
    return Node(node.value, COMMAND_LINE)


def apply_overrides(root: Node, overrides: Iterable[Override], problems: Problems) -> Node:
    """Give *root* with *overrides* put in, one after another."""
    for each in overrides:
        trail = _whole(root, each.trail)
        root = _deleted(root, trail, problems) if each.value is None else _put(root, trail, each.value)
    return root


def _whole(root: Node, trail: KeyPath) -> KeyPath:
    """Give *trail* with the kind of server put in, where it was left out."""
    if len(trail) < 2 or trail[1] in SERVER_KINDS:  # noqa: PLR2004 - a block's name and its implementation
        return trail
    block, implementation = root.get(trail[0]), trail[1]
    there = next((kind for kind in SERVER_KINDS if block and block.get(kind, implementation) is not None), None)
    kind = there or (None if block and block.get(implementation) else find_kind(implementation))
    return trail if kind is None else (trail[0], kind, *trail[1:])


def _put(root: Node, trail: KeyPath, value: Node) -> Node:
    for key in reversed(trail):
        value = Node({key: value}, COMMAND_LINE)
    return merge_nodes(root, normalize_keys(value))


def _deleted(root: Node, trail: KeyPath, problems: Problems) -> Node:
    above = root.get(*trail[:-1])
    if above is None or trail[-1] not in above.children:
        near = format_suggestion(trail[-1], above.children if above else root.children)
        problems.add(COMMAND_LINE, f"there is no {format_key_path(trail)} to delete{near}")
        return root
    return root.without_path(trail)


API_KEY_SETTING = "policy_api_key"
BASE_URL_SETTING = "policy_base_url"

SWITCH_VARIABLES = {"token_file": "GYMSDK_TOKEN_FILE", "insecure": "GYMSDK_INSECURE"}
"""Further settings that an environment variable can give."""


class SettingSource(Enum):
    """Who wrote a setting: the command line or a program, the environment, a named file, one found in the folder."""

    GIVEN = 1
    VARIABLE = 2
    FILE = 3
    FOUND = 4


def get_source(place: Place) -> SettingSource:
    """Give who wrote what stands at *place*."""
    if place in {COMMAND_LINE, HANDED_OVER}:
        return SettingSource.GIVEN
    if place.found:
        return SettingSource.FOUND
    variables = {*ENVIRONMENT_VARIABLES.values(), *SWITCH_VARIABLES.values()}
    return SettingSource.VARIABLE if place.line is None and place.source in variables else SettingSource.FILE


def apply_environment(root: Node) -> tuple[Node, tuple[str, ...]]:
    """Give *root* with what environment variables say, and sentences about a key that is not used.

    A file's base URL never receives the key of an environment variable, nor the other way round: the author of the
    file would learn the user's key, or another server the file's. For the same reason a base URL of an `env.yaml` that
    was found in the working folder receives no key but that file's own, not even one of the command line.
    """
    written = root.get(API_KEY_SETTING)
    for key, variable in {**ENVIRONMENT_VARIABLES, **SWITCH_VARIABLES}.items():
        root = _set(root, key, variable)
    keys = [node for node in (root.get(API_KEY_SETTING), written) if node is not None and node.value]
    if not keys:
        return root, ()
    base_url = root.get(BASE_URL_SETTING)
    whose = get_source(base_url.place) if base_url is not None and base_url.value else None
    fitting = [node for node in keys if whose is None or _fits(get_source(node.place), whose)]
    if fitting:
        return root.with_key(API_KEY_SETTING, fitting[0]), ()
    where = base_url.place if base_url is not None else ""
    note = f"the key of {keys[0].place} is not used for the base URL of {where}; give both in the same place"
    return root.without(API_KEY_SETTING), (note,)


def _fits(key: SettingSource, base_url: SettingSource) -> bool:
    if key is SettingSource.GIVEN:
        return base_url is not SettingSource.FOUND
    if base_url is SettingSource.FILE:
        return key in {SettingSource.FILE, SettingSource.FOUND}
    return key is (SettingSource.FOUND if base_url is SettingSource.FOUND else SettingSource.VARIABLE)


def _set(root: Node, key: str, variable: str) -> Node:
    value, there = os.environ.get(variable), root.get(key)
    if not value or (there is not None and get_source(there.place) is SettingSource.GIVEN):
        return root
    return root.with_key(key, Node(value, Place(source=variable)))
