"""Documents: YAML read with the line of every value."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING

from gymsdk.configuration.nodes import Node, Scalar
from gymsdk.configuration.places import Place
from gymsdk.errors import BadConfig

if TYPE_CHECKING:
    from yaml import MappingNode, SafeLoader
    from yaml.nodes import Node as Written

MOST = 100_000
"""Values a document may have; a short one can repeat itself without end through aliases."""

FLOAT = re.compile(r"[-+]?(?:[0-9][0-9_]*)(?:\.[0-9_]*)?[eE][-+]?[0-9]+|[-+]?\.[0-9_]+[eE][-+]?[0-9]+")
"""Numbers that YAML 1.1 takes for text, and OmegaConf does not."""


def read(text: str, source: str) -> Node:
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
        if self._count > MOST or id(written) in self._open:
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

    Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(f"^(?:{FLOAT.pattern})$"), list("-+0123456789."))
    return Loader
