"""Documents: YAML read with the line of every value."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

from pydantic import BaseModel, ConfigDict

from gymsdk.errors import BadConfig

KeyPath: TypeAlias = tuple[str, ...]
"""The keys that lead to a setting, from the top."""

MIN_SECRET_CHARS = 6
"""Characters below which a secret is not looked for in messages: words like `none` stand in others."""


class Place(BaseModel):
    """Where a setting comes from: a file and a line of it, or a source without lines.

    *found* says that nobody named the file: it was read because it lies in the working folder, or because such a
    file includes it. `untrusted` lists what it may not set. *origin* is set on a resolved value whose text stands in
    another source and refers to a value of such a file: it is the place of that value.
    """

    model_config = ConfigDict(frozen=True)

    source: str
    line: int | None = None
    found: bool = False
    origin: Place | None = None

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


DEFAULT_PLACE = Place(source="default")
COMMAND_LINE = Place(source="command line")
HANDED_OVER = Place(source="handed over")


class Problems:
    """What is wrong with a configuration, gathered so that all of it is told together; no *secrets* are told."""

    def __init__(self) -> None:
        self.secrets: set[str] = set()
        self._warnings: dict[str, None] = {}
        self._lines: dict[str, None] = {}

    def __bool__(self) -> bool:
        return bool(self._lines)

    def add(self, place: Place, sentence: str) -> None:
        """Keep one *sentence* about what stands at *place*."""
        self._lines[f"{place}: {sentence}"] = None

    def warn(self, place: Place, sentence: str) -> None:
        """Keep one *sentence* about what stands at *place* and is ignored: it stops nobody."""
        self._warnings[f"{place}: {sentence}"] = None

    @property
    def warnings(self) -> tuple[str, ...]:
        """The sentences about what is ignored."""
        return tuple(redact_secrets(line, self.secrets) for line in self._warnings)

    def add_error(self, error: BadConfig) -> None:
        """Keep what *error* says, which names its place already."""
        self._lines.update(dict.fromkeys(str(error).splitlines()))

    def merge(self, others: Problems) -> None:
        """Keep what *others* tell."""
        self._lines |= others._lines

    def raise_if_any(self) -> None:
        """Raise `BadConfig` with a line for each, if there are any."""
        if self._lines:
            raise BadConfig("\n".join(redact_secrets(line, self.secrets) for line in self._lines))


def redact_secrets(text: str, secrets: set[str]) -> str:
    """Give *text* with `***` for every secret in it."""
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= MIN_SECRET_CHARS:
            text = text.replace(secret, "***")
    return text


def format_key_path(trail: KeyPath) -> str:
    """Give *trail* as it is written on the command line."""
    return ".".join(trail)


Scalar: TypeAlias = str | int | float | bool | bytes | None

DELETE_KEY = "_delete_key"
"""NeMo Gym's mark in a mapping: what is beneath it does not count."""


@dataclass(frozen=True, slots=True)
class Node:
    """A value and its place; a mapping's and a list's values are nodes themselves."""

    value: dict[str, Node] | list[Node] | Scalar
    place: Place

    @property
    def children(self) -> dict[str, Node]:
        """What a mapping holds; nothing where it is none."""
        return self.value if isinstance(self.value, dict) else {}

    @property
    def is_mapping(self) -> bool:
        """Whether it is a mapping."""
        return isinstance(self.value, dict)

    def mark_found(self) -> Node:
        """Give the same values, marked as read from a file that nobody named."""
        place = self.place.model_copy(update={"found": True})
        if isinstance(self.value, dict):
            return Node({key: each.mark_found() for key, each in self.value.items()}, place)
        return Node([each.mark_found() for each in self.value] if isinstance(self.value, list) else self.value, place)

    def get(self, *trail: str) -> Node | None:
        """Give what *trail* leads to, `None` where nothing is there."""
        found: Node | None = self
        for key in trail:
            found = found.children.get(key) if found is not None else None
        return found

    def place_of(self, trail: KeyPath) -> Place:
        """Give the place of *trail*, or of the nearest above it that is there."""
        place, node = self.place, self
        for key in trail:
            below = get_child(node, key)
            if below is None:
                break
            place, node = below.place, below
        return place

    def with_key(self, key: str, node: Node) -> Node:
        """Give the mapping with *node* under *key*."""
        return Node({**self.children, key: node}, self.place)

    def without(self, *keys: str) -> Node:
        """Give the mapping without *keys*."""
        return Node({key: node for key, node in self.children.items() if key not in keys}, self.place)

    def without_path(self, trail: KeyPath) -> Node:
        """Give the mapping without what *trail* leads to."""
        first, *rest = trail
        below = self.children.get(first)
        if not rest or below is None:
            return self.without(first)
        return self.with_key(first, below.without_path(tuple(rest)))

    def walk(self, trail: KeyPath = ()) -> Iterator[tuple[KeyPath, Node]]:
        """Yield every value beneath that is neither mapping nor list."""
        for key, node in _parts(self):
            if isinstance(node.value, (dict, list)):
                yield from node.walk((*trail, key))
            else:
                yield (*trail, key), node

    def places(self, trail: KeyPath = ()) -> Iterator[tuple[KeyPath, Place]]:
        """Yield the place of everything beneath, mappings and lists too."""
        for key, node in _parts(self):
            yield (*trail, key), node.place
            if isinstance(node.value, (dict, list)):
                yield from node.places((*trail, key))


def get_child(node: Node, key: str) -> Node | None:
    """Give what *key* names in a mapping or, as a number, in a list; `None` where there is nothing."""
    if isinstance(node.value, list):
        return node.value[int(key)] if key.isdecimal() and int(key) < len(node.value) else None
    return node.children.get(key)


def _parts(node: Node) -> Iterator[tuple[str, Node]]:
    if isinstance(node.value, list):
        yield from ((str(number), each) for number, each in enumerate(node.value))
    else:
        yield from node.children.items()


def to_plain(node: Node) -> Any:
    """Give the values of *node* without their places."""
    if isinstance(node.value, dict):
        return {key: to_plain(each) for key, each in node.value.items()}
    if isinstance(node.value, list):
        return [to_plain(each) for each in node.value]
    return node.value


def build_node(value: Any, place: Place) -> Node:
    """Give *value* as a node, all of it at *place*."""
    if isinstance(value, dict):
        return Node({str(key): build_node(each, place) for key, each in value.items()}, place)
    if isinstance(value, (list, tuple)):
        return Node([build_node(each, place) for each in value], place)
    return Node(value if isinstance(value, (str, int, float, bool, bytes)) or value is None else str(value), place)


def merge_nodes(under: Node, over: Node) -> Node:
    """Give *under* with *over* laid over it: mappings are joined, everything else is replaced."""
    if not (under.is_mapping and over.is_mapping):
        return over
    if _deletes(over):
        return over
    both = {**under.children}
    for key, node in over.children.items():
        both[key] = merge_nodes(both[key], node) if key in both else node
    return Node(both, under.place)


def _deletes(node: Node) -> bool:
    mark = node.children.get(DELETE_KEY)
    return mark is not None and mark.value is True


def remove_deleted(node: Node) -> Node:
    """Give *node* without the mappings that only say they are deleted, and without the marks."""
    if not node.is_mapping:
        return node
    kept = {
        key: remove_deleted(each)
        for key, each in node.children.items()
        if key != DELETE_KEY and not _only_deletes(each)
    }
    return Node(kept, node.place)


def _only_deletes(node: Node) -> bool:
    return _deletes(node) and len(node.children) == 1


if TYPE_CHECKING:
    from yaml import MappingNode, SafeLoader
    from yaml.nodes import Node as Written

MAX_VALUES = 100_000
"""Values a document may have; a short one can repeat itself without end through aliases."""

EXPONENT_PATTERN = re.compile(r"[-+]?(?:[0-9][0-9_]*)(?:\.[0-9_]*)?[eE][-+]?[0-9]+|[-+]?\.[0-9_]+[eE][-+]?[0-9]+")
"""Numbers that YAML 1.1 takes for text, and OmegaConf does not."""


def parse_yaml(text: str, source: str) -> Node:
    """Give the values of *text*, which is called *source*; raises `BadConfig` that names the line."""
    from yaml import YAMLError

    try:
        return _Reading(_loader()(text), source).whole()
    except RecursionError:
        raise BadConfig(f"{source}: this is nested too deeply; write fewer brackets into each other") from None
    except YAMLError as error:
        # The parser's own message may quote the line, and with it a key.
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        line = mark.line + 1 if mark else text.count("\n", 0, getattr(error, "position", 0)) + 1
        place = Place(source=source, line=line)
        raise BadConfig(f"{place}: this is no YAML; mend its indentation, colons, quotes and brackets") from None


class _Reading:
    """One document while it is read."""

    def __init__(self, loader: SafeLoader, source: str) -> None:
        self._loader = loader
        self._source = source
        self._count = 0
        self._open: set[int] = set()

    def whole(self) -> Node:
        root = self._loader.get_single_node()
        return Node(None, Place(source=self._source, line=1)) if root is None else self._node(root)

    def _node(self, written: Written) -> Node:
        from yaml import MappingNode, SequenceNode

        self._count += 1
        if self._count > MAX_VALUES or id(written) in self._open:
            raise BadConfig(f"{self._place(written)}: this repeats itself without end; write it out")
        if not isinstance(written, (MappingNode, SequenceNode)):
            return Node(self._value(written), self._place(written))
        self._open.add(id(written))
        below = (
            dict(self._pairs(written))
            if isinstance(written, MappingNode)
            else [self._node(each) for each in written.value]
        )
        self._open.discard(id(written))
        return Node(below, self._place(written))

    def _value(self, written: Written) -> Scalar:
        try:
            value: Scalar = self._loader.construct_object(written)
        except ValueError:
            raise BadConfig(f"{self._place(written)}: this is no number or date that there is; quote it") from None
        if isinstance(value, str) and "\0" in value:
            raise BadConfig(f"{self._place(written)}: this has a character of number 0 in it; leave that out")
        return value

    def _pairs(self, written: MappingNode) -> Iterator[tuple[str, Node]]:
        """Yield keys and values, those of a `<<` first: the mapping's own win."""
        own = [pair for pair in written.value if pair[0].tag != "tag:yaml.org,2002:merge"]
        for key, value in written.value:
            if key.tag == "tag:yaml.org,2002:merge":
                for each in reversed(value.value if value.id == "sequence" else [value]):
                    if each.id != "mapping":
                        raise BadConfig(
                            f"{self._place(key)}: << takes over a mapping; write <<: *NAME with the name of one"
                        )
                    yield from self._node(each).children.items()
        lines: dict[str, int] = {}
        for key, value in own:
            if key.id != "scalar":
                raise BadConfig(f"{self._place(key)}: a key is one word; write it without brackets")
            name, line = str(key.value), key.start_mark.line + 1
            if name in lines:
                raise BadConfig(
                    f"{self._place(key)}: {name!r} stands here and in line {lines[name]}; leave one of them out"
                )
            lines[name] = line
            # A mapping is written where its name is: that is the line people look for.
            yield name, Node(self._node(value).value, Place(source=self._source, line=line))

    def _place(self, written: Written) -> Place:
        return Place(source=self._source, line=written.start_mark.line + 1)


@cache
def _loader() -> type[SafeLoader]:
    from yaml import SafeLoader

    class Loader(SafeLoader):
        """YAML as OmegaConf reads it: numbers with an exponent are numbers, dates are text."""

        yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML's own attribute
            first: [(tag, pattern) for tag, pattern in found if tag != "tag:yaml.org,2002:timestamp"]
            for first, found in SafeLoader.yaml_implicit_resolvers.items()
        }

    Loader.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(f"^(?:{EXPONENT_PATTERN.pattern})$"), list("-+0123456789.")
    )
    return Loader
