"""Files: configuration files and those they include, in the order in which later ones win."""

from __future__ import annotations

import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from gymsdk.configuration import builtin, documents, untrusted
from gymsdk.configuration.kinds import spelled
from gymsdk.configuration.nodes import Node
from gymsdk.configuration.places import Place, Problems
from gymsdk.configuration.resolving import expanded
from gymsdk.errors import BadConfig, suggestion

INCLUDES = "config_paths"


class Files:
    """The files of one configuration, looked for in *folder*; each counts once, what it includes before it."""

    def __init__(self, folder: Path, problems: Problems) -> None:
        self._folder = folder
        self._problems = problems
        self._read: set[str] = set()
        self._open: dict[str, str] = {}

    def load_files(
        self, entries: Sequence[tuple[str, Place]], beside: Path | None = None, *, found: bool = False
    ) -> Iterator[Node]:
        """Yield the settings of each of *entries* in order, each after the files that it includes.

        Args:
            entries: Paths, or names of built-in files, each with the place that names it.
            beside: The folder of the including file, where its entries are looked up first.
            found: Whether nobody named these files; their nodes' places then say so.
        """
        for entry, place in entries:
            try:
                yield from self._one(entry, place, beside, found=found)
            except BadConfig as error:
                self._problems.add_error(error)

    def load_file(self, path: Path, *, found: bool = False) -> Iterator[Node]:
        """Yield the settings of the file at *path* if it exists; *found* as for `named`."""
        if path.is_file():
            yield from self.load_files([(str(path), Place(source=self._shown(path)))], found=found)

    def _one(self, entry: str, place: Place, beside: Path | None, *, found: bool) -> Iterator[Node]:
        folders = [beside, self._folder] if beside else [self._folder]
        path = next((path for folder in folders if (path := folder / entry).is_file()), None)
        text = self._builtin(entry, place, folders) if path is None else _text(path, self._shown(path))
        source = f"built-in {entry}" if path is None else self._shown(path)
        identity = entry if path is None else str(path.resolve())
        if identity in self._open:
            shown = [*self._open.values()][[*self._open].index(identity) :]
            chain = " includes ".join([*shown, source])
            raise BadConfig(f"{place}: {chain}; take one of them out of config_paths")
        if identity in self._read:
            return
        self._read.add(identity)
        self._open[identity] = source
        try:
            root = _mapping(documents.read(text, source))
            root = root.mark_found() if found else root
            yield from self.load_files(included(root, self._problems), path.parent if path else None, found=found)
        finally:
            del self._open[identity]
        yield spelled(root.without(INCLUDES))

    def _builtin(self, entry: str, place: Place, folders: Iterable[Path]) -> str:
        try:
            text = builtin.text(entry)
        except BadConfig as error:
            raise BadConfig(f"{place}: {entry}: {error}") from None
        if text is not None:
            return text
        if any((folder / entry).is_dir() for folder in folders):
            raise BadConfig(f"{place}: {entry} is a folder; name a file in it")
        there = [each.name for pattern in ("*.yaml", "*.yml") for each in self._folder.glob(pattern)]
        near = suggestion(entry, there, "a path is looked up beside the file that names it, then in the folder")
        raise BadConfig(f"{place}: there is no file {entry}{near}")

    def _shown(self, path: Path) -> str:
        try:
            return str(path.resolve().relative_to(self._folder.resolve()))
        except ValueError:
            return str(path)


def included(root: Node, problems: Problems) -> list[tuple[str, Place]]:
    """Give the entries that *root* includes, one or several."""
    node = root.get(INCLUDES)
    if node is None or node.value is None:
        return []
    refused = Problems()
    untrusted.check_references(node, (INCLUDES,), node, refused)
    if refused:
        problems.merge(refused)
        return []
    below = node.value if isinstance(node.value, list) else [node]
    entries = [(expanded(each.value), each.place) for each in below if isinstance(each.value, str)]
    if len(entries) < len(below):
        problems.add(node.place, "config_paths must be a list of files, as in config_paths: [a.yaml, b.yaml]")
    return [(entry.strip(), place) for entry, place in entries if entry.strip()]


def open_to_others(path: Path) -> bool:
    """Whether others than its owner may read *path*."""
    return path.is_file() and bool(path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH))


def _mapping(root: Node) -> Node:
    if root.value is None:
        return Node({}, root.place)
    if root.is_mapping:
        return root
    raise BadConfig(f"{root.place}: a configuration is made of `key: value` lines, as in default_host: 127.0.0.1")


def _text(path: Path, shown: str) -> str:
    read = b""
    try:
        read = path.read_bytes()
        return read.decode()
    except UnicodeDecodeError as error:
        line = read.count(b"\n", 0, error.start) + 1
        raise BadConfig(f"{shown}:{line}: this cannot be read ({type(error).__name__}); give UTF-8 text") from None
    except OSError as error:
        raise BadConfig(f"{shown}: this cannot be read ({error.strerror}); give a file of UTF-8 text") from None
