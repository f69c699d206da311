"""Overrides: settings as they are given on the command line, in our form and in Hydra's."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from gymsdk.configuration import documents
from gymsdk.configuration.kinds import KINDS, kind_of, spelled
from gymsdk.configuration.nodes import Node, merged
from gymsdk.configuration.places import COMMAND, Problems, Trail, dotted
from gymsdk.errors import BadConfig, suggestion

FORM = re.compile(r"(?P<sign>\+{0,2}|~)(?P<key>[^=\s+~]+?)(?:=(?P<value>.*))?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Override:
    """One setting of the command line: the way to it, and its value; none deletes it."""

    trail: Trail
    value: Node | None


def parsed(words: Iterable[str], problems: Problems) -> list[Override]:
    """Give *words* as overrides; what is wrong with them goes to *problems*."""
    found = (_parsed(word, problems) for word in words)
    return [each for each in found if each is not None]


def _parsed(word: str, problems: Problems) -> Override | None:
    form = FORM.fullmatch(word.strip())
    if form is None or (form["value"] is None and form["sign"] != "~"):
        named = word.partition("=")[0]
        problems.add(COMMAND, f"{named!r} is no setting; write it as key=value, as in head_server.port=8000")
        return None
    trail = tuple(form["key"].split("."))
    if not all(trail):
        problems.add(COMMAND, f"{form['key']!r} has an empty part; write it as in head_server.port=8000")
        return None
    if form["sign"] == "~":
        return Override(trail, None)
    try:
        return Override(trail, _value(form["value"]))
    except BadConfig:
        problems.add(COMMAND, f"the value of {form['key']} is no YAML; mend its brackets, or put it into quotes")
        return None


def _value(text: str) -> Node:
    """Give *text* read as YAML; nothing is an empty text."""
    if not text.strip():
        return Node("", COMMAND)
    read = documents.read(text, COMMAND.source)
    if any(":" in key and node.value is None for key, node in read.children.items()):
        raise BadConfig("a colon in a mapping is followed by a space")
    return _placed(read)


def _placed(node: Node) -> Node:
    if isinstance(node.value, dict):
        return Node({key: _placed(each) for key, each in node.value.items()}, COMMAND)
    if isinstance(node.value, list):
        return Node([_placed(each) for each in node.value], COMMAND)
    return Node(node.value, COMMAND)


def applied(root: Node, overrides: Iterable[Override], problems: Problems) -> Node:
    """Give *root* with *overrides* put in, one after another."""
    for each in overrides:
        trail = _whole(root, each.trail)
        root = _deleted(root, trail, problems) if each.value is None else _put(root, trail, each.value)
    return root


def _whole(root: Node, trail: Trail) -> Trail:
    """Give *trail* with the kind of server put in, where it was left out."""
    if len(trail) < 2 or trail[1] in KINDS:  # noqa: PLR2004 - a block's name and its implementation
        return trail
    block, implementation = root.get(trail[0]), trail[1]
    there = next((kind for kind in KINDS if block and block.get(kind, implementation) is not None), None)
    kind = there or (None if block and block.get(implementation) else kind_of(implementation))
    return trail if kind is None else (trail[0], kind, *trail[1:])


def _put(root: Node, trail: Trail, value: Node) -> Node:
    for key in reversed(trail):
        value = Node({key: value}, COMMAND)
    return merged(root, spelled(value))


def _deleted(root: Node, trail: Trail, problems: Problems) -> Node:
    above = root.get(*trail[:-1])
    if above is None or trail[-1] not in above.children:
        near = suggestion(trail[-1], above.children if above else root.children)
        problems.add(COMMAND, f"there is no {dotted(trail)} to delete{near}")
        return root
    return root.without_path(trail)
