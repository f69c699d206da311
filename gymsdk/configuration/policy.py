"""The policy's endpoint: base URL, key and model name, out of files, environment variables and overrides."""

from __future__ import annotations

import os
from enum import Enum

from gymsdk.configuration.nodes import Node
from gymsdk.configuration.places import COMMAND, HANDED, Place
from gymsdk.settings import VARIABLES

KEY = "policy_api_key"
BASE_URL = "policy_base_url"

SWITCHES = {"token_file": "GYMSDK_TOKEN_FILE", "insecure": "GYMSDK_INSECURE"}
"""Further settings that an environment variable can give."""


class Source(Enum):
    """Who wrote a setting: the command line or a program, the environment, a named file, one found in the folder."""

    GIVEN = 1
    VARIABLE = 2
    FILE = 3
    FOUND = 4


def source(place: Place) -> Source:
    """Give who wrote what stands at *place*."""
    if place in {COMMAND, HANDED}:
        return Source.GIVEN
    if place.found:
        return Source.FOUND
    variables = {*VARIABLES.values(), *SWITCHES.values()}
    return Source.VARIABLE if place.line is None and place.source in variables else Source.FILE


def completed(root: Node) -> tuple[Node, tuple[str, ...]]:
    """Give *root* with what environment variables say, and sentences about a key that is not used.

    A file's base URL never receives the key of an environment variable, nor the other way round: the author of the
    file would learn the user's key, or another server the file's. For the same reason a base URL of an `env.yaml` that
    was found in the working folder receives no key but that file's own, not even one of the command line.
    """
    written = root.get(KEY)
    for key, variable in {**VARIABLES, **SWITCHES}.items():
        root = _set(root, key, variable)
    keys = [node for node in (root.get(KEY), written) if node is not None and node.value]
    if not keys:
        return root, ()
    base_url = root.get(BASE_URL)
    whose = source(base_url.place) if base_url is not None and base_url.value else None
    fitting = [node for node in keys if whose is None or _fits(source(node.place), whose)]
    if fitting:
        return root.with_key(KEY, fitting[0]), ()
    where = base_url.place if base_url is not None else ""
    note = f"the key of {keys[0].place} is not used for the base URL of {where}; give both in the same place"
    return root.without(KEY), (note,)


def _fits(key: Source, base_url: Source) -> bool:
    if key is Source.GIVEN:
        return base_url is not Source.FOUND
    if base_url is Source.FILE:
        return key in {Source.FILE, Source.FOUND}
    return key is (Source.FOUND if base_url is Source.FOUND else Source.VARIABLE)


def _set(root: Node, key: str, variable: str) -> Node:
    value, there = os.environ.get(variable), root.get(key)
    if not value or (there is not None and source(there.place) is Source.GIVEN):
        return root
    return root.with_key(key, Node(value, Place(source=variable)))
