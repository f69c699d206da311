"""Parse YAML into a tree of values that know their file and line, and collect problems with their places."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from pydantic import BaseModel, ConfigDict

from gymsdk.errors import BadConfig
from gymsdk.working_folder import shorten_path

if TYPE_CHECKING:
    from yaml import MappingNode, SafeLoader
    from yaml.nodes import Node as ParsedNode

KeyPath: TypeAlias = tuple[str, ...]
"""The keys that lead to a setting, from the top of the configuration."""

Scalar: TypeAlias = str | int | float | bool | bytes | None

MIN_SECRET_CHARS = 6
"""Shorter secrets are not redacted in messages, because texts such as `none` also occur elsewhere."""

MAX_VALUES = 100_000
"""The number of values that a document may have; aliases let a short document repeat itself endlessly."""

DELETE_KEY = "_delete_key"
"""NeMo Gym's marker in a mapping that replaces, rather than extends, an earlier one."""

EXPONENT_PATTERN = re.compile(r"[-+]?(?:[0-9][0-9_]*)(?:\.[0-9_]*)?[eE][-+]?[0-9]+|[-+]?\.[0-9_]+[eE][-+]?[0-9]+")
"""Numbers that YAML 1.1 reads as text and OmegaConf reads as numbers."""


class Place(BaseModel):
    """The origin of a setting: a file and a line, or a source without lines.

    Attributes:
        source: The file, the environment variable, or another source.
        line: The line in the file.
        untrusted: Whether the user did not name the file: gymsdk found it in the working folder, or a file that it
            found includes it. The module `files` restricts what such a file may set.
        origin: For a resolved value of another source that refers to a value in such a file, the place of that value.
    """

    model_config = ConfigDict(frozen=True)

    source: str
    line: int | None = None
    untrusted: bool = False
    origin: Place | None = None

    def __str__(self) -> str:
        source = str(shorten_path(Path(self.source))) if self.source.startswith("/") else self.source
        return source if self.line is None else f"{source}:{self.line}"


DEFAULT_PLACE = Place(source="default")
COMMAND_LINE = Place(source="command line")
HANDED_OVER = Place(source="handed over")


class Problems:
    """Collects the problems of a configuration, to report all of them at once, with *secrets* redacted."""

    def __init__(self) -> None:
        self.secrets: set[str] = set()
        self._warnings: dict[str, None] = {}
        self._errors: dict[str, None] = {}

    def __bool__(self) -> bool:
        return bool(self._errors)

    def add(self, place: Place, message: str) -> None:
        """Add an error about the setting at *place*."""
        self._errors[f"{place}: {message}"] = None

    def warn(self, place: Place, message: str) -> None:
        """Add a warning about the setting at *place*, which is ignored."""
        self._warnings[f"{place}: {message}"] = None

    @property
    def warnings(self) -> tuple[str, ...]:
        """The warnings, each with its place."""
        return tuple(redact_secrets(line, self.secrets) for line in self._warnings)

    def add_all(self, errors: Iterable[tuple[Place, str]]) -> bool:
        """Add *errors*, and return whether there are any."""
        found = [*errors]
        for place, message in found:
            self.add(place, message)
        return bool(found)

    def add_error(self, error: BadConfig) -> None:
        """Add the messages of *error*, which already contain their places."""
        self._errors.update(dict.fromkeys(str(error).splitlines()))

    def merge(self, others: Problems) -> None:
        """Add the errors of *others*."""
        self._errors |= others._errors

    def raise_if_any(self) -> None:
        """Raise the errors, one per line.

        Raises:
            BadConfig: There are errors.
        """
        if self._errors:
            raise BadConfig("\n".join(redact_secrets(line, self.secrets) for line in self._errors))


def redact_secrets(text: str, secrets: set[str]) -> str:
    """Replace every secret in *text* with `***`."""
    # The longest first, because a secret may contain another.
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= MIN_SECRET_CHARS:
            text = text.replace(secret, "***")
    return text


def format_key_path(path: KeyPath) -> str:
    """Return *path* as users write it on the command line, such as `head_server.port`."""
    return ".".join(path)


@dataclass(frozen=True, slots=True)
class YamlNode:
    """A value and its place. The values of mappings and lists are nodes.

    Attributes:
        value: The value.
        place: Its place.
        text: The text of a number or a truth value in the file. YAML reads `0711` as 457, `1.10` as 1.1 and `no` as
            false, which are other keys and other names.
    """

    value: dict[str, YamlNode] | list[YamlNode] | Scalar
    place: Place
    text: str | None = None

    @property
    def children(self) -> dict[str, YamlNode]:
        """The nodes of a mapping by key; empty if the node is no mapping."""
        return self.value if isinstance(self.value, dict) else {}

    @property
    def is_mapping(self) -> bool:
        """Whether the value is a mapping."""
        return isinstance(self.value, dict)

    def map(self, change: Callable[[KeyPath, YamlNode], YamlNode], path: KeyPath = ()) -> YamlNode:
        """Return *change* of this node and its *path*, after that of all nodes below it."""
        if not isinstance(self.value, (dict, list)):
            return change(path, self)
        changed = {key: child.map(change, (*path, key)) for key, child in _iter_children(self)}
        return change(path, YamlNode(changed if self.is_mapping else [*changed.values()], self.place))

    def to_text(self) -> YamlNode:
        """Return the node with the text in the file in place of each number and truth value; null stays null."""
        return self.map(lambda _, node: node if node.text is None else YamlNode(node.text, node.place))

    def get(self, *path: str) -> YamlNode | None:
        """Return the node at *path*, `None` if there is none."""
        node: YamlNode | None = self
        for key in path:
            node = node.children.get(key) if node is not None else None
        return node

    def place_of(self, path: KeyPath) -> Place:
        """Return the place of the node at *path*, or of its nearest ancestor that exists."""
        place, node = self.place, self
        for key in path:
            child = get_child(node, key)
            if child is None:
                break
            place, node = child.place, child
        return place

    def with_key(self, key: str, node: YamlNode) -> YamlNode:
        """Return the mapping with *node* under *key*."""
        return YamlNode({**self.children, key: node}, self.place)

    def without(self, *keys: str) -> YamlNode:
        """Return the mapping without *keys*."""
        return YamlNode({key: node for key, node in self.children.items() if key not in keys}, self.place)

    def without_path(self, path: KeyPath) -> YamlNode:
        """Return the mapping without the node at *path*."""
        first, *rest = path
        child = self.children.get(first)
        if not rest or child is None:
            return self.without(first)
        return self.with_key(first, child.without_path(tuple(rest)))

    def walk(self, path: KeyPath = ()) -> Iterator[tuple[KeyPath, YamlNode]]:
        """Yield the node and all nodes below it, with their paths below *path*."""
        yield path, self
        for key, node in _iter_children(self):
            yield from node.walk((*path, key))

    def leaves(self, path: KeyPath = ()) -> Iterator[tuple[KeyPath, YamlNode]]:
        """Yield each node of `walk` that is neither a mapping nor a list."""
        return (found for found in self.walk(path) if not isinstance(found[1].value, (dict, list)))


def get_child(node: YamlNode, key: str) -> YamlNode | None:
    """Return the node under *key* in a mapping or, as an index, in a list; `None` if there is none."""
    if isinstance(node.value, list):
        return node.value[int(key)] if key.isdecimal() and int(key) < len(node.value) else None
    return node.children.get(key)


def _iter_children(node: YamlNode) -> Iterator[tuple[str, YamlNode]]:
    if isinstance(node.value, list):
        yield from ((str(index), child) for index, child in enumerate(node.value))
    else:
        yield from node.children.items()


def to_plain(node: YamlNode) -> Any:
    """Return the value of *node* without places."""
    if isinstance(node.value, dict):
        return {key: to_plain(child) for key, child in node.value.items()}
    if isinstance(node.value, list):
        return [to_plain(child) for child in node.value]
    return node.value


def map_values(change: Callable[[KeyPath, Any], Any], value: Any, path: KeyPath = ()) -> Any:
    """Return *change* of a plain *value* and its *path*, after that of all values in it."""
    if isinstance(value, Mapping):
        value = {key: map_values(change, item, (*path, str(key))) for key, item in value.items()}
    elif isinstance(value, list | tuple):
        value = [map_values(change, item, (*path, str(index))) for index, item in enumerate(value)]
    return change(path, value)


def build_node(value: Any, place: Place) -> YamlNode:
    """Return *value* as a node whose descendants all are at *place*."""
    if isinstance(value, dict):
        return YamlNode({str(key): build_node(child, place) for key, child in value.items()}, place)
    if isinstance(value, (list, tuple)):
        return YamlNode([build_node(child, place) for child in value], place)
    return YamlNode(value if isinstance(value, (str, int, float, bool, bytes)) or value is None else str(value), place)


def merge_nodes(base: YamlNode, override: YamlNode) -> YamlNode:
    """Return *base* with *override* merged into it: mappings are merged, everything else is replaced."""
    if not (base.is_mapping and override.is_mapping) or _has_delete_key(override):
        return override
    merged = {**base.children}
    for key, node in override.children.items():
        merged[key] = merge_nodes(merged[key], node) if key in merged else node
    return YamlNode(merged, base.place)


def _has_delete_key(node: YamlNode) -> bool:
    marker = node.children.get(DELETE_KEY)
    return marker is not None and marker.value is True


def remove_deleted(node: YamlNode) -> YamlNode:
    """Return *node* without delete markers, and without mappings that consist of such a marker only."""
    if not node.is_mapping:
        return node
    kept = {
        key: remove_deleted(child)
        for key, child in node.children.items()
        if key != DELETE_KEY and not (_has_delete_key(child) and len(child.children) == 1)
    }
    return YamlNode(kept, node.place)


def parse_yaml(text: str, source: str) -> YamlNode:
    """Parse the YAML document *text*.

    Args:
        source: The name of the file, for places.

    Raises:
        BadConfig: The document is invalid. The message has the line, but never its text, which may contain a key.
    """
    from yaml import YAMLError

    try:
        return _Parser(_get_loader()(text), source).parse()
    except RecursionError:
        raise BadConfig(f"{source}: this is nested too deeply; write fewer brackets into each other") from None
    except YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        line = mark.line + 1 if mark else text.count("\n", 0, getattr(error, "position", 0)) + 1
        place = Place(source=source, line=line)
        raise BadConfig(
            f"{place}: this is not valid YAML; check its indentation, colons, quotes and brackets"
        ) from None


class _Parser:
    """Converts one document from the nodes of PyYAML."""

    def __init__(self, loader: SafeLoader, source: str) -> None:
        self._loader = loader
        self._source = source
        self._count = 0
        self._open: set[int] = set()

    def parse(self) -> YamlNode:
        root = self._loader.get_single_node()
        return YamlNode(None, Place(source=self._source, line=1)) if root is None else self._convert(root)

    def _convert(self, yaml_node: ParsedNode) -> YamlNode:
        from yaml import MappingNode, SequenceNode

        self._count += 1
        # An alias within its own anchor has no end.
        if self._count > MAX_VALUES or id(yaml_node) in self._open:
            raise BadConfig(f"{self._get_place(yaml_node)}: this repeats itself without end; write it out")
        if not isinstance(yaml_node, (MappingNode, SequenceNode)):
            value = self._convert_scalar(yaml_node)
            text = yaml_node.value if isinstance(value, (int, float)) else None
            return YamlNode(value, self._get_place(yaml_node), text)
        self._open.add(id(yaml_node))
        children = (
            dict(self._convert_pairs(yaml_node))
            if isinstance(yaml_node, MappingNode)
            else [self._convert(child) for child in yaml_node.value]
        )
        self._open.discard(id(yaml_node))
        return YamlNode(children, self._get_place(yaml_node))

    def _convert_scalar(self, yaml_node: ParsedNode) -> Scalar:
        try:
            value: Scalar = self._loader.construct_object(yaml_node)
        except ValueError:
            raise BadConfig(f"{self._get_place(yaml_node)}: this is not a valid number or date; quote it") from None
        # No file name and no argument of a process can contain it.
        if isinstance(value, str) and "\0" in value:
            raise BadConfig(f"{self._get_place(yaml_node)}: this contains a NUL character; remove it")
        return value

    def _convert_pairs(self, mapping: MappingNode) -> Iterator[tuple[str, YamlNode]]:
        """Yield keys and nodes; those of a merge key `<<` first, so that the mapping's own keys override them."""
        own = [pair for pair in mapping.value if pair[0].tag != "tag:yaml.org,2002:merge"]
        for key, value in mapping.value:
            if key.tag == "tag:yaml.org,2002:merge":
                for merged in reversed(value.value if value.id == "sequence" else [value]):
                    if merged.id != "mapping":
                        raise BadConfig(
                            f"{self._get_place(key)}: << must merge a mapping; write <<: *NAME with the name of one"
                        )
                    yield from self._convert(merged).children.items()
        lines: dict[str, int] = {}
        for key, value in own:
            if key.id != "scalar":
                raise BadConfig(f"{self._get_place(key)}: a key must be one word; write it without brackets")
            # The text of the key, and not its value: `on: 1` has the key `on`.
            name, line = str(key.value), key.start_mark.line + 1
            if name in lines:
                raise BadConfig(
                    f"{self._get_place(key)}: {name!r} is here and in line {lines[name]}; remove one of them"
                )
            lines[name] = line
            # The place of a value is the line of its key, which is where users look for it.
            yield name, replace(self._convert(value), place=Place(source=self._source, line=line))

    def _get_place(self, yaml_node: ParsedNode) -> Place:
        return Place(source=self._source, line=yaml_node.start_mark.line + 1)


@cache
def _get_loader() -> type[SafeLoader]:
    from yaml import SafeLoader

    class Loader(SafeLoader):
        """Reads YAML as OmegaConf does: numbers with an exponent are numbers, dates are text."""

        yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML's own attribute
            first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
            for first, resolvers in SafeLoader.yaml_implicit_resolvers.items()
        }

    Loader.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(f"^(?:{EXPONENT_PATTERN.pattern})$"), list("-+0123456789.")
    )
    return Loader
